"""Losses with the ratio r = exp(logprobs - old_logprobs): GSPO, CISPO, SAPO, SPPO. Legend: see `LossBatch`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roll_opd.objective.losses.batch import LossBatch, beyond, outside
from roll_opd.objective.losses.policy_losses import clipped
from roll_opd.objective.registry import register_policy_loss

SAPO_HEIGHT = 4.0  # factor that makes the gate's slope 1 at r = 1


@register_policy_loss("gspo", loss_agg_mode="seq-mean-token-mean")
def gspo(batch: LossBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    """Return the loss of PPO with the sequence's ratio s instead of r. arXiv 2507.18071.

    s is the geometric mean of r over the sequence. This is GSPO-token: the loss uses sg(s) · π_t/sg(π_t), so all tokens
    of a sequence have the same ratio, but each token has its own gradient.
    """
    one_M = (batch.action_logprobs_M - batch.action_logprobs_M.detach()).exp()
    return clipped(batch.sequence_ratio_M.detach() * one_M, batch, clip_low, clip_high, None)


@outside(gspo)
def _gspo_outside(batch: LossBatch, arguments: Mapping[str, Any]) -> Tensor:
    return beyond(batch.sequence_ratio_M, 1 - arguments["clip_low"], 1 + arguments["clip_high"])


@register_policy_loss("cispo")
def cispo(
    batch: LossBatch,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
    enable_mask_clip: bool = False,
    mask_clip_range_low: float = 1.0,
    mask_clip_range_high: float = 0.28,
) -> Tensor:
    """Return -A · sg(clip(r, 1-low, 1+high)) · logprobs. arXiv 2506.13585.

    The weight is clipped, but the gradient is not.

    Args:
        enable_mask_clip: set the loss to 0 at tokens where PPO has no gradient, as in Trinity-RFT. The clip range of
            PPO is then 1 - mask_clip_range_low to 1 + mask_clip_range_high.
    """
    ratio_M, advantages_M = batch.ratio_M.detach(), batch.advantages_M
    loss_M = -advantages_M * ratio_M.clamp(1 - clip_low, 1 + clip_high) * batch.action_logprobs_M
    if not enable_mask_clip:
        return loss_M
    beyond_M = (ratio_M > 1 + mask_clip_range_high) & (advantages_M > 0)
    beyond_M |= (ratio_M < 1 - mask_clip_range_low) & (advantages_M < 0)
    return loss_M.masked_fill(beyond_M, 0)


@register_policy_loss("sapo")
def sapo(batch: LossBatch, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """Return -A · (4/τ)·σ(τ(r-1)), a soft clip. arXiv 2511.20347.

    τ is tau_pos if A > 0, and tau_neg otherwise.
    """
    tau_M = torch.full_like(batch.advantages_M, tau_neg).masked_fill(batch.advantages_M > 0, tau_pos)
    gate_M = SAPO_HEIGHT / tau_M * torch.sigmoid(tau_M * (batch.ratio_M - 1))
    return -batch.advantages_M * gate_M * batch.mask_M


@register_policy_loss("sppo")
def sppo(batch: LossBatch, *, epsilon: float = 0.3) -> Tensor:
    """Return -A · (logprobs - old_logprobs) if 1/(1+ε) <= r <= 1+ε, and 0 otherwise. arXiv 2108.05828."""
    ratio_M = batch.ratio_M.detach()
    near_M = (ratio_M >= 1 / (1 + epsilon)) & (ratio_M <= 1 + epsilon)
    return torch.where(near_M, -batch.advantages_M * batch.log_ratio_M, 0)


@outside(sppo)
def _sppo_outside(batch: LossBatch, arguments: Mapping[str, Any]) -> Tensor:
    return beyond(batch.ratio_M, 1 / (1 + arguments["epsilon"]), 1 + arguments["epsilon"])
