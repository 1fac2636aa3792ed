"""The loss of on-policy distillation and of the external reward, computed from log-probs and columns.

    loss = rl_loss_coef · Σ_t weight_t · (policy_loss(logprobs_t, old_logprobs_t, A_t) + kl_loss_coef · KL_t)

`objective.reverse_kl` computes the advantages A. With `token-mean`, the weights of a mini-batch's tokens sum to 1.

Legend: M scored tokens of a pack, B sequences.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.losses.batch import LossBatch, beyond_bounds
from roll_opd.objective.reference_kl import KL_ESTIMATORS, READS_OLD
from roll_opd.objective.registry import policy_loss
from roll_opd.objective.reverse_kl import advantages, sampled_mask


def opd_loss(
    logprobs_M: Tensor,
    columns: Mapping[str, Tensor],
    lengths: Sequence[int],
    *,
    objective: ObjectivePlan,
    arguments: Mapping[str, Any],
    step: int,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return (loss, sums, tokens): a pack's contribution to the loss, f32 [], and values for the records.

    `MegatronTrainer.update` explains the sums. The tokens are columns of the samples, f32 [M] each:
    `total_advantages`, and `reverse_kl`, which is Σ opd_kl_coef · reverse_kl. If a log-prob or an advantage is not
    finite, the loss is NaN, and the update is skipped.

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
    total_M, reverse_kl_M = advantages(old_M, columns, lengths, objective)
    # `where` instead of a product, since a masked value may be infinite
    advantages_M = torch.where(mask_M, total_M, 0)
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
    return loss, sums, {"total_advantages": total_M, "reverse_kl": reverse_kl_M}


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
