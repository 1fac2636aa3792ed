"""The student's training engine: policy-gradient updates.

Legend: M scored tokens of a pack.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from roll_opd.algorithms.aggregation import token_weights
from roll_opd.algorithms.kl import k3
from roll_opd.algorithms.losses import POLICY_LOSSES, PolicyLoss, probability_ratio
from roll_opd.algorithms.opd import opd_penalty
from roll_opd.algorithms.returns import discounted_to_go
from roll_opd.config.plan import ObjectivePlan
from roll_opd.data.training import TrainResult, TrainSample
from roll_opd.megatron.batches import PackedBatch, Sample
from roll_opd.megatron.learner import MegatronLearner


class MegatronTrainer(MegatronLearner):
    """A policy that learns."""

    def update(self, samples: Sequence[TrainSample], objective: ObjectivePlan, temperature: float) -> TrainResult:
        """Make one optimizer update from the whole mini-batch `samples`.

        `sums` holds, over this rank's action tokens: `tokens`, `weighted_loss` (Σ over all ranks is the loss),
        `policy_loss` (its part without the KL loss), `kl_loss` (k3 against the reference policy, weighted as the loss
        is, before its coefficient), `ratio`, `clipped` (ratios outside the clip range) and `approx_kl` (k3 of old
        against new).
        """
        loss = partial(_loss, objective=objective, policy_loss=_policy_loss(objective))
        done = self._learn(_columns(samples, objective), loss, temperature)
        return TrainResult(done.sums, done.by_sample("logprobs"), done.grad_norm, done.learning_rate, done.applied)


def _columns(samples: Sequence[TrainSample], objective: ObjectivePlan) -> list[Sample]:
    """Attach to each sample the arrays that the loss reads, each token's share of the global mean among them."""
    masks = [torch.from_numpy(sample.action_mask) for sample in samples]
    weights = token_weights(masks, objective.loss_agg_mode, objective.loss_normaliser)
    result = []
    for sample, weight in zip(samples, weights, strict=True):
        columns = {
            "mask": sample.action_mask,
            "weight": weight.numpy(),
            "advantages": sample.advantages,
            "opd_coefficients": sample.opd_coefficients,
            "opd_teacher": sample.opd_teacher,
        }
        if sample.old_logprobs is not None:
            columns["old_logprobs"] = sample.old_logprobs
        if sample.ref_logprobs is not None:
            columns["ref_logprobs"] = sample.ref_logprobs
        result.append(Sample(sample.tokens, sample.prompt_length, columns))
    return result


def _loss(
    logprobs_M: Tensor, batch: PackedBatch, *, objective: ObjectivePlan, policy_loss: PolicyLoss
) -> tuple[Tensor, dict]:
    columns = batch.columns
    old_M = columns.get("old_logprobs", logprobs_M.detach())
    penalty_M = opd_penalty(old_M, columns["opd_coefficients"], columns["opd_teacher"])
    advantages_M = columns["advantages"] - discounted_to_go(penalty_M, batch.lengths, objective.opd_kl_discount)
    # without a reference policy the student is its own: 0, with gradient 0
    kl_M = k3(logprobs_M, columns.get("ref_logprobs", logprobs_M.detach()))
    policy = (policy_loss(logprobs_M, old_M, advantages_M) * columns["weight"]).sum()
    kl = (kl_M * columns["weight"]).sum()
    loss = policy + objective.kl_loss_coef * kl

    mask_M = columns["mask"]
    ratio_M = probability_ratio(logprobs_M.detach(), old_M)[mask_M]
    outside_M = (ratio_M < 1 - objective.pg_clip_low) | (ratio_M > 1 + objective.pg_clip_high)
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


def _policy_loss(objective: ObjectivePlan) -> PolicyLoss:
    function = POLICY_LOSSES[objective.policy_loss]
    if objective.policy_loss == "ppo":
        return partial(
            function,
            clip_low=objective.pg_clip_low,
            clip_high=objective.pg_clip_high,
            dual_clip=objective.dual_clip,
        )
    return function
