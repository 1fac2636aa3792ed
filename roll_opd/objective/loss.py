"""The loss of on-policy distillation and of the external reward, computed from log-probs and columns.

    reverse_kl_t = old_logprobs_t - teacher_logprobs_t                      (of the sampled token)
    A_t          = clip(A_external_t - Σ_{k≥0} opd_kl_discount^k · Σ_teachers opd_kl_coef · reverse_kl_{t+k})
    loss         = rl_loss_coef · Σ_t weight_t · (policy_loss(logprobs_t, old_logprobs_t, A_t) + kl_loss_coef · KL_t)

In pure distillation A_external is 0. With the policy loss `importance_sampling`, the gradient of the loss is then the
gradient of Σ weight · opd_kl_coef · KL(student || teacher). With `token-mean`, the weights of a mini-batch's tokens sum
to 1. The sum over k is a sum over action tokens (`returns.discounted_to_go`).

With several teachers, the penalty of a token is the sum over the teachers of its sample:

    Σ coef_i (l - q_i) = (Σ coef_i) · l - Σ coef_i · q_i

Two columns, Σ coef_i and Σ coef_i · q_i, are therefore enough for any number of teachers.

If generation runs ahead of training, older weights sampled the tokens. The teachers' part of the advantage is then
multiplied by `stale_weights`, so that the gradient is again the gradient of the KL at the positions of the samples.

A teacher with another tokenizer may have a reverse KL per chunk instead of per token. `objective.chunk_credit` defines
how the tokens of a chunk are credited. The sum over the tokens of a chunk is computed in this module from the log-probs
of the update, like all other terms.

Legend: M scored tokens of a pack, B sequences.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.chunk_credit import chunk_penalty
from roll_opd.objective.kl import KL_ESTIMATORS, READS_OLD
from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.losses.bounds import beyond_bounds
from roll_opd.objective.registry import policy_loss
from roll_opd.objective.returns import discounted_to_go
from roll_opd.objective.token_advantages import clipped
from roll_opd.samples.sample_columns import CHUNKS

STALE_LIMIT = 20.0  # largest importance weight of a stale token in the teachers' part


def opd_loss(
    logprobs_M: Tensor,
    columns: Mapping[str, Tensor],
    lengths: Sequence[int],
    *,
    objective: ObjectivePlan,
    arguments: Mapping[str, Any],
    step: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss, sums): a pack's contribution to the loss, f32 [], and the pack's sums for metrics.

    `MegatronTrainer.update` explains the sums. If a log-prob or an advantage is not finite, the loss is NaN, and the
    update is skipped.

    Args:
        logprobs_M: current log-probs, with a gradient.
        columns: the columns of `objective.columns`, [M] each.
        lengths: number of scored tokens of each sequence.
        arguments: keyword arguments of the policy loss, including defaults.
        step: number of the run's step, from 1.
    """
    mask_M, demonstration_M = columns["mask"], columns.get("demonstration")
    sampled_M = sampled_mask(columns)
    old_M = columns.get("old_logprobs", logprobs_M.detach())
    # demonstrations are not sampled, so their old log-probs are set to the current log-probs
    if demonstration_M is not None:
        old_M = torch.where(demonstration_M, logprobs_M.detach(), old_M)
    penalty_M = opd_penalty(old_M, columns["opd_coefficients"], columns["opd_teacher"])
    for name in (column.removesuffix(CHUNKS) for column in columns if column.endswith(CHUNKS)):
        own_M = opd_penalty(old_M, columns[f"{name}/chunk_coefficients"], columns[f"{name}/chunk_teacher"])
        chunks_M = columns[f"{name}/chunks"]
        penalty_M = penalty_M + chunk_penalty(own_M, old_M, chunks_M, lengths, objective.opd_chunk_credit)
    to_go_M = discounted_to_go(penalty_M, columns.get("actions", mask_M), lengths, objective.opd_kl_discount)
    if "sampling_logprobs" in columns:
        to_go_M = to_go_M * stale_weights(old_M, columns)
    # `where` instead of a product, since a masked value may be infinite
    advantages_M = torch.where(mask_M, clipped(columns["advantages"] - to_go_M, objective.advantage_clip), 0)
    batch = LossBatch(
        logprobs_M,
        old_M,
        advantages_M,
        mask_M,
        tuple(lengths),
        rewards_M=columns.get("rewards"),
        ref_logprobs_M=columns.get("ref_logprobs"),
        demonstration_M=demonstration_M,
        step=step,
    )
    losses_M = policy_loss(objective.policy_loss)(batch, **arguments)
    if "importance_weights" in columns:
        losses_M = losses_M * torch.where(mask_M, columns["importance_weights"], 1)
    policy = (losses_M * columns["weight"]).sum()
    kl = _kl_loss(replace(batch, mask_M=sampled_M), objective.kl_loss, columns["weight"])
    loss = objective.rl_loss_coef * (policy + objective.kl_loss_coef * kl)
    # with a clamped ratio, an infinite log-prob would be trained on unnoticed; a NaN loss skips the update
    loss = torch.where(_finite(batch), loss, math.nan)

    now = replace(batch, logprobs_M=logprobs_M.detach(), mask_M=sampled_M)
    ratio_M = now.ratio_M[sampled_M].double()
    sums = {
        "tokens": sampled_M.sum(),
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
    return loss, sums


def opd_penalty(student_M: Tensor, coefficients_M: Tensor, weighted_teacher_M: Tensor) -> Tensor:
    """Return Σ coef · reverse_kl, f32 [M].

    Where the coefficient is 0, `student_M` is ignored.

    Args:
        student_M: student log-probs, f32.
        coefficients_M: Σ coef_i over the teachers of the token's sample; 0 without teachers and on masked tokens.
        weighted_teacher_M: Σ coef_i · q_i over the same teachers, 0 on masked tokens.
    """
    return torch.where(coefficients_M == 0, 0, coefficients_M * student_M) - weighted_teacher_M


def stale_weights(student_M: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Return the importance weights min(exp(l - l_sampling), `STALE_LIMIT`) of the teachers' part, f32 [M].

    Without these weights, the mean of the penalty acts on the tokens of the older weights as a separate gradient: it
    moves the student away from the older weights, further with each update, and the accuracy falls. A low limit leaves
    a part of this gradient. Tokens outside the mask and tokens of demonstrations have the weight 1.

    Args:
        student_M: student log-probs l under the current weights, f32.
        columns: with `sampling_logprobs`, the log-probs l_sampling of the weights that sampled each token.
    """
    ratio_M = torch.exp(torch.where(sampled_mask(columns), student_M - columns["sampling_logprobs"], 0))
    return ratio_M.clamp(max=STALE_LIMIT)


def sampled_mask(columns: Mapping[str, Tensor]) -> Tensor:
    """Return the mask without the tokens of demonstrations, bool [M]."""
    mask_M, demonstration_M = columns["mask"], columns.get("demonstration")
    return mask_M if demonstration_M is None else mask_M & ~demonstration_M


def _finite(batch: LossBatch) -> Tensor:
    """Return whether all inputs of the loss are finite at the tokens in the mask, bool []."""
    arrays = (batch.logprobs_M, batch.old_logprobs_M, batch.advantages_M, batch.ref_logprobs_M)
    read_XM = torch.stack([values_M.detach() for values_M in arrays if values_M is not None])
    return (torch.isfinite(read_XM) | ~batch.mask_M).all()


def _kl_loss(batch: LossBatch, name: str, weight_M: Tensor) -> Tensor:
    """Return the weighted KL loss relative to the reference policy.

    Without log-probs of the reference policy, the loss and its gradient are 0.
    """
    logprobs_M = batch.action_logprobs_M
    reference_M = logprobs_M.detach() if batch.ref_logprobs_M is None else batch.ref_logprobs_M
    others = [torch.where(batch.mask_M, other_M, 0) for other_M in (reference_M, batch.old_logprobs_M)]
    kl_M = KL_ESTIMATORS[name](logprobs_M, *(others if name in READS_OLD else others[:1]))
    return (kl_M * weight_M).sum()
