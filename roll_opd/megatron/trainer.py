"""The student's training engine: policy-gradient updates.

Legend: M scored tokens of a pack, X whatever is stacked.
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from roll_opd.algorithms.aggregation import token_weights
from roll_opd.algorithms.kl import KL_ESTIMATORS
from roll_opd.algorithms.losses.batch import LossBatch, probability_ratio
from roll_opd.algorithms.losses.table import PolicyLoss
from roll_opd.algorithms.opd import opd_penalty
from roll_opd.algorithms.returns import discounted_to_go
from roll_opd.algorithms.table import policy_loss
from roll_opd.config.plan import ObjectivePlan, TrainPlan
from roll_opd.data.arrays import as_tensor
from roll_opd.data.training import TrainResult, TrainSample
from roll_opd.megatron.batches import PackedBatch, Sample
from roll_opd.megatron.distillation import distillation_loss, teacher_columns
from roll_opd.megatron.head import OutputHead, TeacherHead, teacher_head
from roll_opd.megatron.learner import MegatronLearner
from roll_opd.megatron.model import unwrapped


class MegatronTrainer(MegatronLearner):
    """A policy that learns."""

    def __init__(self, plan: TrainPlan, *, seed: int, deterministic: bool = False) -> None:
        super().__init__(plan, seed=seed, deterministic=deterministic)
        self.teacher_heads: dict[str, TeacherHead] = {}

    def update(self, samples: Sequence[TrainSample], objective: ObjectivePlan, temperature: float) -> TrainResult:
        """Make one optimizer update from the whole mini-batch `samples`.

        `sums` holds, over this rank's action tokens: `tokens`, `weighted_loss` (Σ over all ranks is the loss),
        `policy_loss` (its part without the KL loss), `kl_loss` (KL to the reference policy, weighted as the loss
        is, before its coefficient), `ratio`, `clipped` (ratios outside the clip range) and `approx_kl` (k3 of old
        against new); where there is such a part of the loss, `opd_loss` (divergence from the teachers, with their
        coefficients) and `entropy` (before its coefficient), both weighted as the loss is.
        """
        arguments = objective.policy_loss_arguments
        function = partial(policy_loss(objective.policy_loss, arguments), **arguments)

        def loss(head: OutputHead, batch: PackedBatch) -> tuple[Tensor, dict]:
            value, report = _loss(head.logprobs(), batch, objective=objective, function=function)
            if objective.entropy_loss_coef:
                entropy = (head.entropy() * batch.columns["weight"]).sum()
                value = value - objective.entropy_loss_coef * entropy
                report["sums"]["entropy"] = entropy.detach()
            if objective.opd_objective != "sampled":
                distillation = distillation_loss(head, batch, objective, self.teacher_heads)
                value = value + distillation
                report["sums"]["opd_loss"] = distillation.detach()
            report["sums"]["weighted_loss"] = value.detach()
            return value, report

        done = self._learn(_columns(samples, objective), loss, temperature, together=2 if objective.paired else 1)
        return TrainResult(done.sums, done.by_sample("logprobs"), done.grad_norm, done.learning_rate, done.applied)

    def load_teacher_head(self, name: str, head: np.ndarray) -> None:
        """Take in a teacher's whole output embedding [W, F], for the objective `full`; each rank keeps its part."""
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return
        group = parallel_state.get_tensor_model_parallel_group()
        columns = unwrapped(self.chunks[-1]).output_weight().size(0)
        self.teacher_heads[name] = teacher_head(as_tensor(head), columns, group, self.device)


def _columns(samples: Sequence[TrainSample], objective: ObjectivePlan) -> list[Sample]:
    """Attach to each sample the arrays that the loss reads, each token's share of the global mean among them."""
    masks = [torch.from_numpy(sample.action_mask) for sample in samples]
    weights = token_weights(masks, objective.loss_agg_mode, objective.loss_normaliser)
    result = []
    for sample, weight, said in zip(samples, weights, teacher_columns(samples), strict=True):
        columns = {
            "mask": sample.action_mask,
            "weight": weight.numpy(),
            "advantages": sample.advantages,
            "opd_coefficients": sample.opd_coefficients,
            "opd_teacher": sample.opd_teacher,
        }
        if sample.old_logprobs is not None:
            columns["old_logprobs"] = sample.old_logprobs
        if sample.importance_weights is not None:
            columns["importance_weights"] = sample.importance_weights
        if sample.ref_logprobs is not None:
            columns["ref_logprobs"] = sample.ref_logprobs
        if sample.reward is not None:
            columns["rewards"] = np.full(len(sample.action_mask), sample.reward, np.float32)
        result.append(Sample(sample.tokens, sample.prompt_length, columns | said))
    return result


def _loss(
    logprobs_M: Tensor, batch: PackedBatch, *, objective: ObjectivePlan, function: PolicyLoss
) -> tuple[Tensor, dict]:
    columns = batch.columns
    old_M = columns.get("old_logprobs", logprobs_M.detach())
    penalty_M = opd_penalty(old_M, columns["opd_coefficients"], columns["opd_teacher"])
    advantages_M = columns["advantages"] - discounted_to_go(penalty_M, batch.lengths, objective.opd_kl_discount)
    mask_M, ref_M = columns["mask"], columns.get("ref_logprobs")
    read = LossBatch(
        logprobs_M, old_M, advantages_M, mask_M, batch.lengths, rewards_M=columns.get("rewards"), ref_logprobs_M=ref_M
    )
    policy = (function(read) * columns.get("importance_weights", 1.0) * columns["weight"]).sum()
    kl = _kl_loss(read, objective.kl_loss, columns["weight"])
    loss = policy + objective.kl_loss_coef * kl
    # a clamped ratio would hide what is infinite, and the weights would follow it; a loss of NaN skips the update
    loss = torch.where(_finite(read), loss, math.nan)

    ratio_M = probability_ratio(logprobs_M.detach(), old_M)[mask_M]
    clip = {"clip_low": objective.pg_clip_low, "clip_high": objective.pg_clip_high} | objective.policy_loss_arguments
    outside_M = (ratio_M < 1 - clip["clip_low"]) | (ratio_M > 1 + clip["clip_high"])
    sums = {
        "tokens": mask_M.sum(),
        "weighted_loss": loss.detach(),
        "policy_loss": policy.detach(),
        "ratio": ratio_M.sum(),
        "clipped": outside_M.sum(),
        "approx_kl": (1 / ratio_M - 1 + ratio_M.log()).sum(),
        "kl_loss": kl.detach(),
    }
    pieces = logprobs_M.detach().float().cpu().split(list(batch.lengths))
    return loss, {"sums": sums, "logprobs": [piece.numpy() for piece in pieces]}


def _finite(batch: LossBatch) -> Tensor:
    """Whether all that the loss reads of the mask's tokens is finite, bool []."""
    found = (batch.logprobs_M, batch.old_logprobs_M, batch.advantages_M, batch.ref_logprobs_M)
    read_XM = torch.stack([values_M.detach() for values_M in found if values_M is not None])
    return (torch.isfinite(read_XM) | ~batch.mask_M).all()


def _kl_loss(batch: LossBatch, name: str, weight_M: Tensor) -> Tensor:
    """To the reference policy; without one the student is its own: 0, with gradient 0."""
    logprobs_M = batch.action_logprobs_M
    reference_M = logprobs_M.detach() if batch.ref_logprobs_M is None else batch.ref_logprobs_M
    others = [torch.where(batch.mask_M, other_M, 0) for other_M in (reference_M, batch.old_logprobs_M)]
    estimator = KL_ESTIMATORS[name]
    kl_M = estimator(logprobs_M, *others) if name == "corrected_k3" else estimator(logprobs_M, others[0])
    return (kl_M * weight_M).sum()
