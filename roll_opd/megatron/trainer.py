"""The student's training engine: policy-gradient updates.

Legend: M scored tokens of a pack.
"""

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from roll_opd.algorithms.registry import POLICY_LOSSES, policy_loss
from roll_opd.config.plan import ObjectivePlan, TrainPlan
from roll_opd.megatron.batches import PackedBatch
from roll_opd.megatron.distillation import distillation_loss
from roll_opd.megatron.head import OutputHead, TeacherHead, teacher_head
from roll_opd.megatron.learner import MegatronLearner
from roll_opd.megatron.model import HeadModel, unwrapped
from roll_opd.models.device_phases import Part
from roll_opd.objective.loss import opd_loss, sampled_mask
from roll_opd.samples.sample import Sample
from roll_opd.samples.tensors import as_tensor
from roll_opd.samples.training import TrainResult


class MegatronTrainer(MegatronLearner):
    """Policy training engine: forward, loss, backward, optimizer step."""

    def __init__(self, plan: TrainPlan, *, seed: int, deterministic: bool = True) -> None:
        super().__init__(plan, seed=seed, deterministic=deterministic)
        self.teacher_heads: dict[str, TeacherHead] = {}

    def update(
        self,
        samples: Sequence[Sample],
        objective: ObjectivePlan,
        temperature: float,
        step: int = 1,
        *,
        assigned: list[list[int]] | None = None,
    ) -> TrainResult:
        """Make one optimizer update from a mini-batch, in step `step` of the run (from 1).

        `samples` have the columns of `objective.columns.loss_columns`. With `assigned`, they are this data-parallel
        rank's shard alone: see `samples.dp_shards`.

        `sums` holds, over this rank's action tokens: `tokens`, `weighted_loss` (Σ over all ranks is the loss),
        `policy_loss` (its part without the KL loss), `kl_loss` (KL to the reference policy, weighted as the loss
        is, before its coefficient), `ratio`, `clipped` (ratios outside of the loss's own bounds) and `approx_kl`
        (r - 1 - log r, of old against new); where there is such a part of the loss, `opd_loss` (divergence from the
        teachers, with their coefficients) and `entropy` (before its coefficient), both weighted as the loss is.
        Demonstrations are in the loss alone; where there are any, `demonstration_tokens` counts them,
        `demonstration_loss` is their -logprobs, weighted as the loss is, whatever the policy loss makes of them.
        """
        policy_loss(objective.policy_loss, objective.policy_loss_args)  # raises where they do not fit
        arguments = {**POLICY_LOSSES.defaults(objective.policy_loss), **objective.policy_loss_args}

        def loss(head: OutputHead, batch: PackedBatch) -> tuple[Tensor, dict]:
            logprobs_M = head.logprobs()
            value, sums = opd_loss(
                logprobs_M, batch.columns, batch.lengths, objective=objective, arguments=arguments, step=step
            )
            if objective.entropy_loss_coef:
                entropy = torch.where(sampled_mask(batch.columns), head.entropy() * batch.columns["weight"], 0).sum()
                value = value - objective.entropy_loss_coef * entropy
                sums["entropy"] = entropy.detach()
            if objective.opd_objective != "sampled":
                distillation = distillation_loss(head, batch, objective, self.teacher_heads)
                value = value + distillation
                sums["opd_loss"] = distillation.detach()
            sums["weighted_loss"] = value.detach()
            return value, {"sums": sums, "logprobs": _by_sequence(logprobs_M, batch.lengths)}

        done = self._learn(samples, loss, temperature, 2 if objective.paired else 1, assigned)
        return TrainResult(done.sums, done.by_sample("logprobs"), done.grad_norm, done.learning_rate, done.applied)

    def _tensors(self) -> dict[Part, list[Tensor]]:
        tensors = super()._tensors()
        tensors[Part.WEIGHTS] += [head.weight_VF for head in self.teacher_heads.values()]
        return tensors

    def load_teacher_head(self, name: str, head: np.ndarray) -> None:
        """Store this rank's part of a teacher's whole output embedding [W, F], for the objective `full`."""
        self.memory.check("a teacher's output embedding", Part.WEIGHTS)
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return
        group = parallel_state.get_tensor_model_parallel_group()
        model = unwrapped(self.chunks[-1])
        assert isinstance(model, HeadModel)
        columns = model.output_weight().size(0)
        self.teacher_heads[name] = teacher_head(as_tensor(head), columns, group, self.device)


def _by_sequence(logprobs_M: Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    return [piece.numpy() for piece in logprobs_M.detach().float().cpu().split(list(lengths))]
