"""The student's training engine: policy-gradient updates.

Legend: M scored tokens of a pack, X whatever is stacked.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from roll_opd.algorithms.aggregation import loss_scales, scaled
from roll_opd.algorithms.kl import KL_ESTIMATORS, READS_OLD
from roll_opd.algorithms.losses.batch import LossBatch
from roll_opd.algorithms.losses.bounds import beyond_bounds
from roll_opd.algorithms.opd import opd_penalty
from roll_opd.algorithms.registry import POLICY_LOSSES, policy_loss
from roll_opd.algorithms.returns import discounted_to_go
from roll_opd.algorithms.token_advantages import clipped
from roll_opd.config.plan import ObjectivePlan, TrainPlan
from roll_opd.megatron.batches import PackedBatch, Sample
from roll_opd.megatron.distillation import distillation_loss, teacher_columns
from roll_opd.megatron.head import OutputHead, TeacherHead, teacher_head
from roll_opd.megatron.learner import MegatronLearner
from roll_opd.megatron.model import HeadModel, unwrapped
from roll_opd.models.device_phases import Part
from roll_opd.samples.tensors import as_tensor
from roll_opd.samples.training import TrainResult, TrainSample


class MegatronTrainer(MegatronLearner):
    """A policy that is trained."""

    def __init__(self, plan: TrainPlan, *, seed: int, deterministic: bool = True) -> None:
        super().__init__(plan, seed=seed, deterministic=deterministic)
        self.teacher_heads: dict[str, TeacherHead] = {}

    def update(
        self,
        samples: Sequence[TrainSample],
        objective: ObjectivePlan,
        temperature: float,
        step: int = 1,
        *,
        assigned: list[list[int]] | None = None,
        scales: Sequence[float] | None = None,
    ) -> TrainResult:
        """Make one optimizer update from the whole mini-batch `samples`, in step `step` of the run (from 1).

        With `assigned` and `scales`, `samples` are this data-parallel rank's share alone: see `samples.dp_shards`.

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
            value, report = _loss(head.logprobs(), batch, objective=objective, arguments=arguments, step=step)
            if objective.entropy_loss_coef:
                entropy = torch.where(_own(batch), head.entropy() * batch.columns["weight"], 0).sum()
                value = value - objective.entropy_loss_coef * entropy
                report["sums"]["entropy"] = entropy.detach()
            if objective.opd_objective != "sampled":
                distillation = distillation_loss(head, batch, objective, self.teacher_heads)
                value = value + distillation
                report["sums"]["opd_loss"] = distillation.detach()
            report["sums"]["weighted_loss"] = value.detach()
            return value, report

        columns, group_size = _columns(samples, objective, scales), 2 if objective.paired else 1
        done = self._learn(columns, loss, temperature, group_size, assigned)
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


def _columns(
    samples: Sequence[TrainSample], objective: ObjectivePlan, scales: Sequence[float] | None = None
) -> list[Sample]:
    """Attach to each sample the arrays that the loss reads, each token's share of the global mean among them."""
    masks = [torch.from_numpy(sample.action_mask) for sample in samples]
    demonstrations = [sample.demonstration for sample in samples]
    if scales is None:
        scales = loss_scales([int(mask.sum()) for mask in masks], demonstrations, objective)
    weights = scaled(masks, scales)
    optional = [_optional(sample) for sample in samples]
    names = {name for arrays in optional for name in arrays}
    result = []
    for sample, weight, arrays, targets in zip(samples, weights, optional, teacher_columns(samples), strict=True):
        columns = {
            "mask": sample.action_mask,
            "weight": weight.numpy(),
            "advantages": sample.advantages,
            "opd_coefficients": sample.opd_coefficients,
            "opd_teacher": sample.opd_teacher,
        }
        if objective.opd_kl_discount:
            columns["actions"] = sample.action_mask if sample.actions is None else sample.actions
        if any(demonstrations):
            columns["demonstration"] = np.full(len(sample.action_mask), sample.demonstration)
        if sample.demonstration:  # arrays that other samples have: zeros, which the loss does not read; a weight of 1
            columns |= {n: np.full(len(sample.action_mask), n == "importance_weights", np.float32) for n in names}
        result.append(Sample(sample.tokens, sample.prompt_length, columns | arrays | targets, sample.routes))
    return result


def _optional(sample: TrainSample) -> dict[str, np.ndarray]:
    reward = None if sample.reward is None else np.full(len(sample.action_mask), sample.reward, np.float32)
    arrays = {"old_logprobs": sample.old_logprobs, "ref_logprobs": sample.ref_logprobs, "rewards": reward}
    arrays["importance_weights"] = sample.importance_weights
    return {name: array for name, array in arrays.items() if array is not None}


def _own(batch: PackedBatch) -> Tensor:
    """Return which tokens are actions that the student sampled itself, bool [M]."""
    mask_M, demonstration_M = batch.columns["mask"], batch.columns.get("demonstration")
    return mask_M if demonstration_M is None else mask_M & ~demonstration_M


def _loss(
    logprobs_M: Tensor, batch: PackedBatch, *, objective: ObjectivePlan, arguments: Mapping[str, Any], step: int
) -> tuple[Tensor, dict]:
    columns = batch.columns
    own_M, demonstration_M = _own(batch), columns.get("demonstration")
    old_M = columns.get("old_logprobs", logprobs_M.detach())
    if demonstration_M is not None:  # not sampled: their old log-probs are the current ones
        old_M = torch.where(demonstration_M, logprobs_M.detach(), old_M)
    mask_M, ref_M = columns["mask"], columns.get("ref_logprobs")
    penalty_M = opd_penalty(old_M, columns["opd_coefficients"], columns["opd_teacher"])
    to_go_M = discounted_to_go(penalty_M, columns.get("actions", mask_M), batch.lengths, objective.opd_kl_discount)
    # where, not a product: what is off the mask may be infinite
    advantages_M = torch.where(mask_M, clipped(columns["advantages"] - to_go_M, objective.advantage_clip), 0)
    read = LossBatch(
        logprobs_M,
        old_M,
        advantages_M,
        mask_M,
        batch.lengths,
        rewards_M=columns.get("rewards"),
        ref_logprobs_M=ref_M,
        demonstration_M=demonstration_M,
        step=step,
    )
    losses_M = policy_loss(objective.policy_loss)(read, **arguments)
    if "importance_weights" in columns:
        losses_M = losses_M * torch.where(mask_M, columns["importance_weights"], 1)
    policy = (losses_M * columns["weight"]).sum()
    kl = _kl_loss(replace(read, mask_M=own_M), objective.kl_loss, columns["weight"])
    loss = objective.rl_loss_coef * (policy + objective.kl_loss_coef * kl)
    # a clamped ratio would hide an infinite log-prob and train on it; a loss of NaN skips the update
    loss = torch.where(_finite(read), loss, math.nan)

    now = replace(read, logprobs_M=logprobs_M.detach(), mask_M=own_M)
    ratio_M = now.ratio_M[own_M].double()
    sums = {
        "tokens": own_M.sum(),
        "weighted_loss": loss.detach(),
        "policy_loss": policy.detach(),
        "ratio": ratio_M.sum(),
        "clipped": beyond_bounds(objective.policy_loss, now, arguments).sum(),
        "approx_kl": (ratio_M - 1 - ratio_M.log()).sum(),
        "kl_loss": kl.detach(),
    }
    if demonstration_M is not None:
        learned_M = mask_M & demonstration_M
        sums["demonstration_tokens"] = learned_M.sum()
        sums["demonstration_loss"] = -(logprobs_M.detach() * columns["weight"])[learned_M].sum()
    pieces = logprobs_M.detach().float().cpu().split(list(batch.lengths))
    return loss, {"sums": sums, "logprobs": [piece.numpy() for piece in pieces]}


def _finite(batch: LossBatch) -> Tensor:
    """Whether everything that the loss reads is finite at the tokens of the mask, bool []."""
    arrays = (batch.logprobs_M, batch.old_logprobs_M, batch.advantages_M, batch.ref_logprobs_M)
    read_XM = torch.stack([values_M.detach() for values_M in arrays if values_M is not None])
    return (torch.isfinite(read_XM) | ~batch.mask_M).all()


def _kl_loss(batch: LossBatch, name: str, weight_M: Tensor) -> Tensor:
    """Return the weighted KL loss to the reference policy; without a reference policy 0, with gradient 0."""
    logprobs_M = batch.action_logprobs_M
    reference_M = logprobs_M.detach() if batch.ref_logprobs_M is None else batch.ref_logprobs_M
    others = [torch.where(batch.mask_M, other_M, 0) for other_M in (reference_M, batch.old_logprobs_M)]
    kl_M = KL_ESTIMATORS[name](logprobs_M, *(others if name in READS_OLD else others[:1]))
    return (kl_M * weight_M).sum()
