"""Megatron engine of one rank: builds a model in a layout, and computes token log-probs and distillation targets.

The engine runs under plain `torchrun` or in a Ray worker. Every method is collective: all ranks of the role call it.
There are two ways to pass a batch. Either all ranks pass the whole batch, or each data-parallel rank passes its own
shard together with the micro-batches in `assigned` (see `samples.micro_batches`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from roll_opd.config.plan import EngineCheckPlan, MegatronPlan, MicroBatchLimits
from roll_opd.megatron import parallel
from roll_opd.megatron.deterministic_ops import VECTOR
from roll_opd.megatron.layer_specs import uses_transformer_engine
from roll_opd.megatron.model_builder import BuiltModel, HeadModel, build_model, unwrapped
from roll_opd.megatron.offload import DeviceMemory
from roll_opd.megatron.output_head import OutputHead, whole_head
from roll_opd.megatron.packing import PackedBatch, columns_of, pack
from roll_opd.models.device_phases import Part, Phase
from roll_opd.objective.engine_evidence import tested_settings
from roll_opd.samples.micro_batches import Packing
from roll_opd.samples.sample import Sample
from roll_opd.samples.transport import as_array

# functions of a micro-batch on the last pipeline stage: (output of the model, batch) -> ...
Reader = Callable[[Any, PackedBatch], dict[str, Tensor]]  # ... values by name, each [M] or [M, K]
LossFunction = Callable[[Any, PackedBatch], tuple[Tensor, dict[str, Any]]]  # ... loss and report
TokenValues = dict[int, dict[str, np.ndarray]]  # sequence number -> arrays by name, each [T-P] or [T-P, K]


@dataclass(frozen=True)
class TargetRequest:
    """Values that a distillation objective needs in addition to log-probs."""

    topk: int | None = None  # number of most likely tokens
    ids: Sequence[np.ndarray] | None = None  # tokens to score in place of a top-k, integer [T-P, K] for each sequence
    hidden: bool = False  # final hidden states
    plain: bool = False  # log-probs of the top-k at temperature 1
    moments: EngineCheckPlan | None = None  # moments of the sampling distribution (`objective.engine_evidence`)
    # columns of each sequence that `moments` reads
    tested: Sequence[Mapping[str, np.ndarray]] | None = None
    vocab_size: int | None = None  # `topk` and `ids` are over the first `vocab_size` tokens; None: over all

    def values(self, head: OutputHead, batch: PackedBatch) -> dict[str, Tensor]:
        """Return the requested values of a micro-batch by name.

        Each value is a tensor with one row per scored token, so with M rows.
        """
        values, within = {"logprobs": head.logprobs()}, head.within(self.vocab_size)
        if self.topk is not None:
            ids_MK, logprobs_ML = within.topk(self.topk)
            values |= _topk(ids_MK.int(), logprobs_ML)
            if self.plain:
                values["plain_logprobs"] = within.at_temperature(1.0).logprobs_with_rest(ids_MK)[:, :-1]
        elif self.ids is not None:
            ids_MK = batch.columns["topk_ids"]
            values |= _topk(ids_MK, within.logprobs_with_rest(ids_MK.long()))
        if self.moments:
            values["moments"] = head.moments(tested_settings(batch.columns, self.moments, values["logprobs"]))
        if self.hidden:
            values["hidden"] = head.hidden()
        return values


def check_scored_tokens(samples: Iterable[Sample], vocab_size: int) -> None:
    """Raise ValueError if a scored token is outside the `vocab_size` token ids of the softmax.

    On the device, the logit of such a token would count as 0. The ids are checked on the host, because the host would
    have to wait for the result of a check on the device.
    """
    largest = max((int(sample.response_tokens.max(initial=0)) for sample in samples), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"token {largest} has no log-prob, as log-probs are normalised over {vocab_size} token ids; raise"
            " vocab_size, or leave out the sequences with this token"
        )


class MegatronEngine:
    """Frozen model that computes log-probs."""

    trainable = False
    _has_gradient = False  # whether a gradient was accumulated since the last update
    chunks: Sequence[torch.nn.Module]

    def __init__(self, plan: MegatronPlan, *, seed: int, deterministic: bool = True) -> None:
        """Initialise the process group and load the weights. Raises ValueError for an unsupported model or layout.

        With `deterministic`, two runs give the same bits. In f32, two layouts without context parallelism then also
        give the same bits (see `deterministic_ops`). Without `deterministic`, computation is faster, and results differ
        between layouts by rounding.
        """
        self.plan, self._exact = plan, deterministic
        if not self.trainable:  # inference engines may read a trainable model's weights through IPC handles
            parallel.use_expandable_segments()
        self.device = parallel.initialize(plan.layout, seed, deterministic)
        built = self._build(seed)
        self.chunks, self.weights, self.adapters = built.chunks, built.weights, built.adapters
        self._vocab_size = unwrapped(built.chunks[0]).vocab_size_real
        # expert ranks exchange tokens in every micro-batch, so all ranks need the same number of micro-batches
        self._needs_equal_micro_batches = bool(self.weights.config.num_moe_experts)
        self._context = parallel.context_rank()
        # Sharing prefixes changes the order of sums and so the last bits. With context parallelism, Transformer Engine
        # locates a sequence's pieces by its length, so prefixes cannot be shared.
        can_share = self._context.ranks == 1 or not uses_transformer_engine(self.weights.config.params_dtype)
        self.share_prefixes = not deterministic and can_share
        # multiples of tp give equal slices for sequence parallelism, multiples of VECTOR full vectors in
        # `deterministic_ops`
        self._pack_multiple = math.lcm(plan.layout.tp, VECTOR)
        # callback before each micro-batch and after the last: (number started, total)
        self.on_micro_batch: Callable[[int, int], None] = lambda started, total: None
        self.memory = DeviceMemory(plan.name, self.device, self._tensors, is_constant=type(self) is MegatronEngine)

    def _build(self, seed: int) -> BuiltModel:
        return build_model(self.plan, seed=seed, trainable=self.trainable, exact=self._exact)

    @property
    def data_parallel_rank(self) -> int:
        """Index of the batch shard that this rank computes."""
        return parallel_state.get_data_parallel_rank()

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last pipeline stage. Only the last stage reads the columns of the samples."""
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def packing(self) -> Packing:
        """Rules for the distribution of sequences over data-parallel ranks and micro-batches."""
        return Packing(
            parallel_state.get_data_parallel_world_size(),
            # required by the interleaved schedule
            multiple=self.plan.layout.pp if self.plan.layout.vpp else 1,
            equal=self._needs_equal_micro_batches,
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
            sequences: pairs (tokens int64 [T], prompt length P >= 1).
            temperature: number by which the logits are divided.
            routes: experts that the inference engine chose for each sequence, integer [T-1, L, K]. The model replays
                these choices if the plan requests this (see `router`).
            assigned: this rank's micro-batches as indices of `sequences`. If this is None, `sequences` is the whole
                batch, and the rank selects its part.

        Returns:
            A dict with all sequences of this model replica: index of the sequence -> log-probs, f32 [T-P]. Only one
            rank of the replica returns this dict; all other ranks return None.
        """
        computed = self.compute_targets(sequences, temperature, TargetRequest(), routes=routes, assigned=assigned)
        return None if computed is None else {number: values["logprobs"] for number, values in computed.items()}

    def compute_targets(
        self,
        sequences: Sequence[tuple[np.ndarray, int]],
        temperature: float,
        request: TargetRequest,
        *,
        routes: Sequence[np.ndarray | None] | None = None,
        assigned: list[list[int]] | None = None,
    ) -> TokenValues | None:
        """Return log-probs and the requested targets from one forward pass.

        The arguments are the same as in `compute_logprobs`. In addition, `request` names the targets. The result of
        each sequence is a dict with these entries:

        - `logprobs`: f32 [T-P].
        - `topk_ids`, `topk_logprobs`: int32 and f32 [T-P, K], if `request` has `topk` or `ids`.
        - `topk_rest`: log-prob of all other tokens together, f32 [T-P], if `request` has `topk` or `ids`.
        - `plain_logprobs`: f32 [T-P, K], if `request` has `topk` and `plain`.
        - `moments`: f32 [T-P, X], if `request` has `moments` (see `OutputHead.moments`).
        - `hidden`: [T-P, E], if `request` has `hidden` (see `samples.transport`).
        """
        columns: Sequence[Mapping[str, np.ndarray]] = [{}] * len(sequences)
        if request.ids is not None:
            columns = [{"topk_ids": row} for row in request.ids]
        elif request.tested is not None:
            columns = request.tested
        routed = routes or [None] * len(sequences)
        samples = [
            Sample(tokens, prompt, own, taken)
            for (tokens, prompt), own, taken in zip(sequences, columns, routed, strict=True)
        ]
        return self._forward(samples, temperature, request.values, assigned)

    def output_head(self) -> np.ndarray | None:
        """Return the full output embedding [W, E] on one rank, and None on all other ranks. Collective.

        `samples.transport` describes the format of the array.
        """
        self.memory.check("return its output embedding", Part.WEIGHTS)
        self.wait_for_weights()
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
        """Run forward passes without gradients.

        Returns the values that `read` computes for the samples of this model replica. On ranks that do not return
        results, the result is None.
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
        """Return this data-parallel rank's micro-batches as lists of sample indices; see `samples.micro_batches`."""
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
        """Run Megatron's schedule over this rank's micro-batches.

        - `assigned`: for each micro-batch, the indices of its samples.
        - `finish`: function that the last pipeline stage calls with the model's output and the batch.

        On the last pipeline stage, the result has one entry per micro-batch. With `forward_only`, the entry is the
        value that `finish` returns. Otherwise `finish` is a loss function that returns (loss, report), and the entry is
        the report.
        """
        self.memory.check("compute", Part.WEIGHTS)
        check_scored_tokens(samples, self._vocab_size)
        if not assigned:
            return []
        routes = next((sample.routes.shape[1:] for sample in samples if sample.routes is not None), None)
        settings: Any = {"share_prefixes": self.share_prefixes, "context": self._context}
        settings |= {"like": samples[0], "routes": routes}
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
        sources[0] = self._report_progress(sources[0], len(packed))
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=sources if len(sources) > 1 else sources[0],
            model=list(self.chunks) if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(packed),
            seq_length=1,  # not used: the shapes of packs differ and are exchanged
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        self.on_micro_batch(len(packed), len(packed))
        self._after_run(packed)
        return outputs

    def offload(self, parts: Iterable[Part], phase: Phase) -> None:
        """Free device memory for other roles during a phase; see `DeviceMemory.offload`. Collective."""
        if Part.WEIGHTS in parts:
            self.wait_for_weights()
        self.memory.offload(parts, phase, keeps_gradients=self._has_gradient)

    def _tensors(self) -> dict[Part, list[Tensor]]:
        """Return the tensors that occupy device memory between calls."""
        return {Part.WEIGHTS: [parameter for chunk in self.chunks for parameter in chunk.parameters()]}

    def wait_for_weights(self) -> None:
        """Wait for pending weight updates; called before weights are read. Collective."""

    def _before_run(self, packed: Sequence[PackedBatch]) -> None:
        """Hook that runs before the micro-batches. Collective."""

    def _after_run(self, packed: Sequence[PackedBatch]) -> None:
        """Hook that runs after the micro-batches. Collective."""

    def _with_columns(
        self, packed: Sequence[PackedBatch], samples: Sequence[Sample], assigned: Sequence[Sequence[int]]
    ) -> Iterator[PackedBatch]:
        """Yield micro-batches with their columns.

        The columns are moved to the device for one micro-batch at a time, because the columns of all micro-batches may
        not fit into the device's memory.
        """
        for batch, numbers in zip(packed, assigned, strict=True):
            yield replace(batch, columns=columns_of([samples[n] for n in numbers], samples[0], self.device))

    def _report_progress(self, batches: Iterator[PackedBatch], total: int) -> Iterator[PackedBatch]:
        for started, batch in enumerate(batches):
            self.on_micro_batch(started, total)
            yield batch


# Megatron needs a token count with each loss; our losses are divided by the global count already.
_ONE_TOKEN = torch.ones((), dtype=torch.int)


def _topk(ids_MK: Tensor, logprobs_ML: Tensor) -> dict[str, Tensor]:
    return {"topk_ids": ids_MK, "topk_logprobs": logprobs_ML[:, :-1], "topk_rest": logprobs_ML[:, -1]}


def _by_sequence(values: dict[str, Tensor], lengths: Sequence[int]) -> list[dict[str, np.ndarray]]:
    pieces = {name: value.split(list(lengths)) for name, value in values.items()}
    return [{name: as_array(piece[number]) for name, piece in pieces.items()} for number in range(len(lengths))]
