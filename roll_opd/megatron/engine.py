"""The Megatron engine of one rank: a model, its layout, and token log-probs of any set of sequences.

Runs under plain `torchrun` as well as in a Ray worker. Every method is collective: all ranks of the role call it with
the same arguments, or each data-parallel rank with its own share of them, `assigned` to its micro-batches (`packing`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from roll_opd.config.plan import MegatronPlan, MicroBatchLimits
from roll_opd.megatron import parallel
from roll_opd.megatron.batches import PackedBatch, columns_of, pack
from roll_opd.megatron.deterministic_ops import VECTOR
from roll_opd.megatron.head import OutputHead, whole_head
from roll_opd.megatron.layers import uses_transformer_engine
from roll_opd.megatron.model import BuiltModel, HeadModel, build_model, unwrapped
from roll_opd.megatron.offload import Memory
from roll_opd.models.device_phases import Part, Phase
from roll_opd.samples.dp_shards import Packing
from roll_opd.samples.sample import Sample
from roll_opd.samples.tensors import as_array

# what is computed of a micro-batch on the last pipeline stage: (what the model ends in, the batch) -> ...
Reader = Callable[[Any, PackedBatch], dict[str, Tensor]]  # ... values by name, each [M] or [M, K]
LossFunction = Callable[[Any, PackedBatch], tuple[Tensor, dict[str, Any]]]  # ... the loss, and a report
TokenValues = dict[int, dict[str, np.ndarray]]  # sequence number -> arrays by name, each [T-P] or [T-P, K]


class MegatronEngine:
    """A frozen model that computes log-probs."""

    trainable = False
    chunks: Sequence[torch.nn.Module]

    def __init__(self, plan: MegatronPlan, *, seed: int, deterministic: bool = True) -> None:
        """Join the process group and load the weights. Raises ValueError for a model that cannot run here.

        With `deterministic`, every run gives the same bits, and in f32 every layout without context parallelism does
        (see `exact`); without, at less cost, layouts differ by rounding.
        """
        self.plan, self._exact = plan, deterministic
        if not self.trainable:  # engines may read the weights of one that learns through handles
            parallel.let_segments_grow()
        self.device = parallel.initialize(plan.layout, seed, deterministic)
        built = self._build(seed)
        self.chunks, self.weights, self.adapters = built.chunks, built.weights, built.adapters
        # ranks that share experts exchange tokens in every micro-batch, so that all must have as many
        self._meets_in_micro_batches = bool(self.weights.config.num_moe_experts)
        self._context = parallel.context_rank()
        # sums over fewer tokens have other last bits; and Transformer Engine finds the pieces of sequences that are
        # cut over context ranks by their lengths
        is_findable = self._context.ranks == 1 or not uses_transformer_engine(self.weights.config.params_dtype)
        self.share_prefixes = not deterministic and is_findable
        # sequence parallelism gives each tensor rank an equal slice; whole vectors: see `exact`
        self._pack_multiple = math.lcm(plan.layout.tp, VECTOR)
        # called before each micro-batch, and after the last one: how many were begun, and how many there are
        self.on_micro_batch: Callable[[int, int], None] = lambda begun, total: None
        self.memory = Memory(plan.name, self.device, self._tensors, is_constant=type(self) is MegatronEngine)

    def _build(self, seed: int) -> BuiltModel:
        return build_model(self.plan, seed=seed, trainable=self.trainable, exact=self._exact)

    @property
    def data_parallel_rank(self) -> int:
        """Which of the shares of a batch this rank computes."""
        return parallel_state.get_data_parallel_rank()

    @property
    def is_last_stage(self) -> bool:
        """Whether the pipeline ends here: no other stage reads the columns of a batch."""
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def packing(self) -> Packing:
        """How sequences are spread over the data-parallel ranks."""
        return Packing(
            parallel_state.get_data_parallel_world_size(),
            # the interleaved schedule takes turns of so many
            multiple=self.plan.layout.pp if self.plan.layout.vpp else 1,
            equal=self._meets_in_micro_batches,
            share_prefixes=self.share_prefixes,
        )

    def compute_logprobs(
        self,
        sequences: Sequence[tuple[np.ndarray, int]],
        temperature: float,
        routes: Sequence[np.ndarray | None] | None = None,
        assigned: list[list[int]] | None = None,
    ) -> dict[int, np.ndarray] | None:
        """Return the log-prob of every token after the prompt.

        Args:
            sequences: (tokens int64 [T], prompt length P >= 1) each.
            temperature: divides the logits.
            routes: of each sequence, integer [T-1, L, K], to which experts the inference engine sent each token; they
                are replayed where the plan says so (see `replay`).
            assigned: this rank's micro-batches, of numbers of `sequences`; None: these are all, and it takes its part.

        Returns:
            On the rank of each data-parallel group that returns its results: sequence number -> f32 [T-P], for that
            group's share. None on the others.
        """
        computed = self.compute_targets(sequences, temperature, routes=routes, assigned=assigned)
        return None if computed is None else {number: values["logprobs"] for number, values in computed.items()}

    def compute_targets(
        self,
        sequences: Sequence[tuple[np.ndarray, int]],
        temperature: float,
        *,
        topk: int | None = None,
        ids: Sequence[np.ndarray] | None = None,
        hidden: bool = False,
        plain: bool = False,
        vocab_size: int | None = None,
        routes: Sequence[np.ndarray | None] | None = None,
        assigned: list[list[int]] | None = None,
    ) -> TokenValues | None:
        """Return log-probs and whatever else a distillation objective needs of a teacher, in one forward pass.

        Args:
            sequences, temperature, routes, assigned: as for `compute_logprobs`.
            topk: also give this many most likely tokens.
            ids: also give the log-probs of these tokens, integer [T-P, K] a sequence.
            hidden: also give the final hidden states.
            plain: also give the log-probs of the `topk` at temperature 1, whatever `temperature` is.
            vocab_size: `topk` and `ids` are over the first so many tokens of the vocabulary; None: over all.

        Returns:
            As `compute_logprobs` does, but a dict a sequence: `logprobs` f32 [T-P], `topk_ids` int32 [T-P, K],
            `topk_logprobs` f32 [T-P, K] and `topk_rest` f32 [T-P], the log-prob of all other tokens together (for
            `topk` or `ids`), `plain_logprobs` f32 [T-P, K] (for `plain`), `hidden` [T-P, E] (see `samples.tensors`).
        """
        columns: Sequence[Mapping[str, np.ndarray]] = [{}] * len(sequences)
        if ids is not None:
            columns = [{"topk_ids": row} for row in ids]
        routed = routes or [None] * len(sequences)
        samples = [
            Sample(tokens, prompt, own, taken)
            for (tokens, prompt), own, taken in zip(sequences, columns, routed, strict=True)
        ]

        def read(head: OutputHead, batch: PackedBatch) -> dict[str, Tensor]:
            values = {"logprobs": head.logprobs()}
            if topk is not None:
                ids_MK, logprobs_ML = head.within(vocab_size).topk(topk)
                values |= _topk(ids_MK.int(), logprobs_ML)
                if plain:
                    bare = head.at_temperature(1.0).within(vocab_size)
                    values["plain_logprobs"] = bare.logprobs_with_rest(ids_MK)[:, :-1]
            elif ids is not None:
                ids_MK = batch.columns["topk_ids"]
                values |= _topk(ids_MK, head.within(vocab_size).logprobs_with_rest(ids_MK.long()))
            if hidden:
                values["hidden"] = head.hidden()
            return values

        return self._forward(samples, temperature, read, assigned)

    def output_head(self) -> np.ndarray | None:
        """Return the whole output embedding [W, E] (see `samples.tensors`) on one rank, else None. Collective."""
        self.memory.check("its output embedding", Part.WEIGHTS)
        self.settle()
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        model = unwrapped(self.chunks[-1])
        assert isinstance(model, HeadModel)
        group = parallel_state.get_tensor_model_parallel_group()
        head_WE = whole_head(model.output_weight(), model.vocab_size_real, group)
        returned_here = parallel.returns_results() and parallel_state.get_data_parallel_rank() == 0
        return as_array(head_WE) if returned_here else None

    def _forward(
        self,
        samples: Sequence[Sample],
        temperature: float,
        read: Reader,
        assigned: list[list[int]] | None = None,
    ) -> TokenValues | None:
        """Run forward passes without gradients; return what `read` gives for each sample of this rank's group.

        That is on the rank that returns its data-parallel group's results; None on the others.
        """
        if assigned is None:
            assigned = self._assigned(samples, self.plan.forward_limits)
        with torch.no_grad():
            outputs = self._run(
                samples,
                assigned,
                temperature,
                lambda end, batch: _by_sequence(read(end, batch), batch.lengths),
                forward_only=True,
            )
        if not parallel.returns_results():
            return None
        return {
            number: values
            for numbers, output in zip(assigned, outputs, strict=True)
            for number, values in zip(numbers, output, strict=True)
        }

    def _assigned(self, samples: Sequence[Sample], limits: MicroBatchLimits, group_size: int = 1) -> list[list[int]]:
        """Return this data-parallel rank's micro-batches, as sample numbers; see `samples.packing`."""
        sequences = [(sample.tokens, sample.prompt_length) for sample in samples]
        return self.packing.assign(sequences, limits, group_size)[self.data_parallel_rank]

    def _run(
        self,
        samples: Sequence[Sample],
        assigned: Sequence[Sequence[int]],
        temperature: float,
        finish: Callable[[Any, PackedBatch], Any],
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron's schedule over this rank's micro-batches, which are `assigned` so many of `samples`, or none.

        `finish` takes what the model ends in on the last pipeline stage, and the batch. The result has one entry a
        micro-batch on that stage: with `forward_only` whatever `finish` returned, else the report of `finish`, which is
        a loss function then.
        """
        self.memory.check("a pass through its layers", Part.WEIGHTS)
        if not assigned:
            return []
        routes = next((sample.routes.shape[1:] for sample in samples if sample.routes is not None), None)
        settings: Any = {"share_prefixes": self.share_prefixes, "context": self._context, "like": samples[0]}
        settings["routes"] = routes
        packed = [
            pack([replace(samples[n], columns={}) for n in numbers], self.device, self._pack_multiple, **settings)
            for numbers in assigned
        ]

        self.weights.config.routing_replay.begin_run()  # type: ignore[attr-defined]
        self._before_run(packed)

        def forward_step(batches: Any, model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
            batch: PackedBatch = next(batches)
            output = model(batch, temperature)

            def finished(end: Any, non_loss_data: bool = False) -> Any:
                if forward_only:
                    return finish(end, batch)
                value, report = finish(end, batch)
                return value, _ONE_TOKEN, report

            return output, finished

        sources = [iter(packed) for _ in self.chunks]
        if self.is_last_stage:
            sources[-1] = self._with_columns(packed, samples, assigned)
        sources[0] = self._told(sources[0], len(packed))
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=sources if len(sources) > 1 else sources[0],
            model=list(self.chunks) if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(packed),
            seq_length=1,  # not used: shapes differ from pack to pack and are exchanged
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        self.on_micro_batch(len(packed), len(packed))
        self._after_run(packed)
        return outputs

    def give_back(self, parts: Iterable[Part], phase: Phase) -> None:
        """Leave the device to other roles in a phase, as `Memory.give_back` does. Collective."""
        if Part.WEIGHTS in parts:
            self.settle()
        self.memory.give_back(parts, phase)

    def _tensors(self) -> dict[Part, list[Tensor]]:
        """Return what takes memory between two calls."""
        return {Part.WEIGHTS: [parameter for chunk in self.chunks for parameter in chunk.parameters()]}

    def settle(self) -> None:
        """Wait for what still changes the weights, before they are read. Collective."""

    def _before_run(self, packed: Sequence[PackedBatch]) -> None:
        """Do what a subclass wants to know of its micro-batches before they are run. Collective."""

    def _after_run(self, packed: Sequence[PackedBatch]) -> None:
        """Do what a subclass wants to know of its micro-batches after they were run. Collective."""

    def _with_columns(
        self, packed: Sequence[PackedBatch], samples: Sequence[Sample], assigned: Sequence[Sequence[int]]
    ) -> Iterator[PackedBatch]:
        """Bring each micro-batch's columns as it begins: hidden states of them all may be more than a device holds."""
        for batch, numbers in zip(packed, assigned, strict=True):
            yield replace(batch, columns=columns_of([samples[n] for n in numbers], samples[0], self.device))

    def _told(self, batches: Iterator[PackedBatch], total: int) -> Iterator[PackedBatch]:
        for begun, batch in enumerate(batches):
            self.on_micro_batch(begun, total)
            yield batch


# Megatron wants a token count with each loss; ours is already divided by the global one.
_ONE_TOKEN = torch.ones((), dtype=torch.int)


def _topk(ids_MK: Tensor, logprobs_ML: Tensor) -> dict[str, Tensor]:
    return {"topk_ids": ids_MK, "topk_logprobs": logprobs_ML[:, :-1], "topk_rest": logprobs_ML[:, -1]}


def _by_sequence(values: dict[str, Tensor], lengths: Sequence[int]) -> list[dict[str, np.ndarray]]:
    pieces = {name: value.split(list(lengths)) for name, value in values.items()}
    return [{name: as_array(piece[number]) for name, piece in pieces.items()} for number in range(len(lengths))]
