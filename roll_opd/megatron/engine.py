"""The Megatron engine of one rank: a model, its layout, and token log-probs of any set of sequences.

Runs under plain `torchrun` as well as in a Ray worker. Every method is collective: all ranks of the role call it with
the same arguments.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from roll_opd.config.plan import MegatronPlan, MicroBatchLimits
from roll_opd.data.arrays import as_array
from roll_opd.data.packing import assign
from roll_opd.megatron import parallel
from roll_opd.megatron.batches import PackedBatch, Sample, pack
from roll_opd.megatron.bridge import Bridge
from roll_opd.megatron.exact import VECTOR
from roll_opd.megatron.head import OutputHead, whole_head
from roll_opd.megatron.model import build_model, unwrapped

# what is wanted of a micro-batch, computed on the last pipeline stage: (what the model ends in, the batch) -> ...
Reader = Callable[[Any, PackedBatch], dict[str, Tensor]]  # ... values by name, each [M] or [M, K]
LossFunction = Callable[[Any, PackedBatch], tuple[Tensor, dict[str, Any]]]  # ... the loss, and a report
Scores = dict[int, dict[str, np.ndarray]]


class MegatronEngine:
    """A frozen model that scores."""

    trainable = False

    def __init__(self, plan: MegatronPlan, *, seed: int, deterministic: bool = False) -> None:
        """Join the process group and load the weights. Raises ValueError for a model that cannot run here."""
        self.plan = plan
        self.device = parallel.initialize(plan.layout, seed, deterministic)
        self.chunks, self.bridge = self._build()
        # sequence parallelism gives each tensor rank an equal slice; whole vectors: see `exact`
        self._pack_multiple = math.lcm(plan.layout.tp, VECTOR)

    def _build(self) -> tuple[list[torch.nn.Module], Bridge]:
        return build_model(self.plan, trainable=self.trainable)

    def compute_logprobs(
        self, sequences: Sequence[tuple[np.ndarray, int]], temperature: float
    ) -> dict[int, np.ndarray] | None:
        """Score every token after the prompt.

        Args:
            sequences: (tokens int64 [T], prompt length P >= 1) each.
            temperature: divides the logits.

        Returns:
            On the ranks that speak for their data-parallel group: sequence number -> f32 [T-P], for that group's
            share. None on the others.
        """
        found = self.compute_targets(sequences, temperature)
        return None if found is None else {number: values["logprobs"] for number, values in found.items()}

    def compute_targets(
        self,
        sequences: Sequence[tuple[np.ndarray, int]],
        temperature: float,
        *,
        topk: int | None = None,
        ids: Sequence[np.ndarray] | None = None,
        hidden: bool = False,
        vocab_size: int | None = None,
    ) -> Scores | None:
        """Score every token after the prompt, and whatever else a distillation objective needs, in one pass.

        Args:
            sequences, temperature: as for `compute_logprobs`.
            topk: also give this many most likely tokens.
            ids: also give the log-probs of these tokens, integer [T-P, K] a sequence.
            hidden: also give the final hidden states.
            vocab_size: `topk` and `ids` are over the first so many tokens of the vocabulary; None: over all.

        Returns:
            As `compute_logprobs` does, but a dict a sequence: `logprobs` f32 [T-P], `topk_ids` int32 [T-P, K] and
            `topk_logprobs` f32 [T-P, K] (for `topk` or `ids`), `hidden` [T-P, E] (see `data.arrays`).
        """
        columns = [{} if ids is None else {"topk_ids": row} for row in (ids or [None] * len(sequences))]
        samples = [Sample(tokens, prompt, own) for (tokens, prompt), own in zip(sequences, columns, strict=True)]

        def read(head: OutputHead, batch: PackedBatch) -> dict[str, Tensor]:
            values = {"logprobs": head.logprobs()}
            if topk is not None:
                best_MK, values["topk_logprobs"] = head.within(vocab_size).topk(topk)
                values["topk_ids"] = best_MK.int()
            elif ids is not None:
                values["topk_ids"] = batch.columns["topk_ids"]
                values["topk_logprobs"] = head.within(vocab_size).logprobs(batch.columns["topk_ids"].long())
            if hidden:
                values["hidden"] = head.hidden_ME
            return values

        return self._read(samples, temperature, read)

    def output_head(self) -> np.ndarray | None:
        """The whole output embedding [W, E] (see `data.arrays`) from one rank; None on the others. Collective."""
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        model = unwrapped(self.chunks[-1])
        group = parallel_state.get_tensor_model_parallel_group()
        head_WE = whole_head(model.output_weight(), model.vocab_size_real, group)
        first = parallel.reports_logprobs() and parallel_state.get_data_parallel_rank() == 0
        return as_array(head_WE) if first else None

    def _read(self, samples: Sequence[Sample], temperature: float, read: Reader) -> Scores | None:
        """What `read` gives for each sample of this data-parallel group, on the rank that speaks for it."""
        mine = self._assigned(samples, self.plan.forward_limits)
        with torch.no_grad():
            outputs = self._run(
                [[samples[n] for n in numbers] for numbers in mine], temperature, read, forward_only=True
            )
        if not parallel.reports_logprobs():
            return None
        return {
            number: values
            for numbers, output in zip(mine, outputs, strict=True)
            for number, values in zip(numbers, output, strict=True)
        }

    def _assigned(self, samples: Sequence[Sample], limits: MicroBatchLimits, together: int = 1) -> list[list[int]]:
        """This data-parallel rank's micro-batches, as sample numbers."""
        ranks = parallel_state.get_data_parallel_world_size()
        lengths = [len(sample.tokens) for sample in samples]
        return assign(lengths, ranks, limits, together)[parallel_state.get_data_parallel_rank()]

    def _run(
        self,
        micro_batches: Sequence[Sequence[Sample]],
        temperature: float,
        finish: Reader | LossFunction,
        forward_only: bool,
    ) -> list[Any]:
        """Drive Megatron's schedule over the micro-batches.

        Returns, on the last pipeline stage, one entry a micro-batch: with `forward_only` the list of its sequences'
        values, which the reader `finish` gave; else the report of the loss function `finish`.
        """
        if not micro_batches:
            return []
        packed = [pack(samples, self.device, self._pack_multiple) for samples in micro_batches]

        def forward_step(batches: Any, model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
            batch: PackedBatch = next(batches)
            output = model(batch.tokens_N, batch.positions_N, batch.scored_M, batch.packed_seq_params, temperature)

            def finished(end: Any, non_loss_data: bool = False) -> Any:
                if forward_only:
                    return _by_sequence(finish(end, batch), batch.lengths)
                value, report = finish(end, batch)
                return value, _ONE_TOKEN, report

            return output, finished

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(packed) for _ in self.chunks] if len(self.chunks) > 1 else iter(packed),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(packed),
            seq_length=1,  # not used: shapes differ from pack to pack and are exchanged
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


# Megatron wants a token count with each loss; ours is already divided by the global one.
_ONE_TOKEN = torch.ones((), dtype=torch.int)


def _by_sequence(values: dict[str, Tensor], lengths: Sequence[int]) -> list[dict[str, np.ndarray]]:
    pieces = {name: value.split(list(lengths)) for name, value in values.items()}
    return [{name: as_array(piece[number]) for name, piece in pieces.items()} for number in range(len(lengths))]
