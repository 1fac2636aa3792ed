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
from roll_opd.data.packing import assign
from roll_opd.megatron import parallel
from roll_opd.megatron.batches import PackedBatch, Sample, pack
from roll_opd.megatron.exact import VECTOR
from roll_opd.megatron.model import build_model

LossFunction = Callable[[Tensor, PackedBatch], tuple[Tensor, dict[str, Tensor]]]


class MegatronEngine:
    """A frozen model that scores."""

    trainable = False

    def __init__(self, plan: MegatronPlan, *, seed: int, deterministic: bool = False) -> None:
        """Join the process group and load the weights. Raises ValueError for a model that cannot run here."""
        self.plan = plan
        self.device = parallel.initialize(plan.layout, seed, deterministic)
        self.chunks, self.bridge = build_model(plan, trainable=self.trainable)
        # sequence parallelism gives each tensor rank an equal slice; whole vectors: see `exact`
        self._pack_multiple = math.lcm(plan.layout.tp, VECTOR)

    def logprobs(self, sequences: Sequence[tuple[np.ndarray, int]], temperature: float) -> dict[int, np.ndarray] | None:
        """Score every token after the prompt.

        Args:
            sequences: (tokens int64 [T], prompt length P >= 1) each.
            temperature: divides the logits.

        Returns:
            On the ranks that speak for their data-parallel group: sequence number -> f32 [T-P], for that group's
            share. None on the others.
        """
        samples = [Sample(tokens, prompt_length, {}) for tokens, prompt_length in sequences]
        mine = self._assigned(samples, self.plan.forward_limits)
        with torch.no_grad():
            outputs = self._run(
                [[samples[n] for n in numbers] for numbers in mine], temperature, loss=None, forward_only=True
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
        loss: LossFunction | None,
        forward_only: bool,
    ) -> list[Any]:
        """Drive Megatron's schedule over the micro-batches.

        Returns, on the last pipeline stage, one entry a micro-batch: the list of its sequences' log-probs where
        `loss` is None, else the loss function's report.
        """
        if not micro_batches:
            return []
        packed = [pack(samples, self.device, self._pack_multiple) for samples in micro_batches]

        def forward_step(batches: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch: PackedBatch = next(batches)
            output = model(batch.tokens_N, batch.positions_N, batch.scored_M, batch.packed_seq_params, temperature)

            def finish(logprobs_M: Tensor, non_loss_data: bool = False) -> Any:
                if loss is None:
                    return _by_sequence(logprobs_M, batch.lengths)
                value, report = loss(logprobs_M, batch)
                return value, _ONE_TOKEN, report

            return output, finish

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(packed) for _ in self.chunks] if len(self.chunks) > 1 else iter(packed),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(packed),
            seq_length=1,  # not used: shapes differ from pack to pack and are exchanged
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=loss is None,
        )


# Megatron wants a token count with each loss; ours is already divided by the global one.
_ONE_TOKEN = torch.ones((), dtype=torch.int)


def _by_sequence(values_M: Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    return [piece.cpu().numpy() for piece in values_M.detach().float().split(list(lengths))]
