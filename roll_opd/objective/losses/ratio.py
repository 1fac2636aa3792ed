"""Ratio losses with r = exp(logprobs - old_logprobs): PPO, GSPO, CISPO, SAPO, SPPO. Legend: see `batch`."""

from typing import Literal

import torch
from torch import Tensor

from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.registry import register_policy_loss

SAPO_HEIGHT = 4.0  # factor that makes the gate's slope 1 at r = 1


@register_policy_loss("importance_sampling")
def importance_sampling(batch: LossBatch) -> Tensor:
    """Return -A · r. Thinking Machines, "On-Policy Distillation" (2025)."""
    return -batch.advantages_M * batch.ratio_M * batch.mask_M


@register_policy_loss("ppo", reads_pg_clip=True)
def ppo(
    batch: LossBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    ratio_type: Literal["token", "sequence"] = "token",
) -> Tensor:
    """Return max(-A·r, -A·clip(r, 1-low, 1+high)). arXiv 1707.06347.

    Args:
        dual_clip: for A < 0, the loss is at most -A · dual_clip. arXiv 1912.09729.
        ratio_type: "token", or "sequence" to use the geometric mean of the sequence's ratios as r.
    """
    if ratio_type not in ("token", "sequence"):
        raise ValueError(f"ratio_type {ratio_type!r} of policy loss ppo is unknown; use token or sequence")
    ratio_M = batch.ratio_M if ratio_type == "token" else batch.sequence_ratio_M
    return _clipped(ratio_M, batch, clip_low, clip_high, dual_clip)


@register_policy_loss("gspo", loss_agg_mode="seq-mean-token-mean")
def gspo(batch: LossBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    """Return the loss of PPO with the sequence's ratio s instead of r. arXiv 2507.18071.

    s is the geometric mean of r over the sequence. This is GSPO-token: the loss uses sg(s) · π_t/sg(π_t), so all tokens
    of a sequence have the same ratio, but each token has its own gradient.
    """
    one_M = (batch.action_logprobs_M - batch.action_logprobs_M.detach()).exp()
    return _clipped(batch.sequence_ratio_M.detach() * one_M, batch, clip_low, clip_high, None)


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


def _clipped(ratio_M: Tensor, batch: LossBatch, clip_low: float, clip_high: float, dual_clip: float | None) -> Tensor:
    minus_M = -batch.advantages_M
    loss_M = torch.maximum(minus_M * ratio_M, minus_M * ratio_M.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss_M = torch.where(minus_M > 0, torch.minimum(loss_M, minus_M * dual_clip), loss_M)
    return loss_M * batch.mask_M
