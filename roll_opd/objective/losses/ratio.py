"""Ratio losses with r = exp(logprobs - old_logprobs): importance sampling, PPO. Legend: see `batch`."""

from typing import Literal

import torch
from torch import Tensor

from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.registry import register_policy_loss


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
    return clipped(ratio_M, batch, clip_low, clip_high, dual_clip)


def clipped(ratio_M: Tensor, batch: LossBatch, clip_low: float, clip_high: float, dual_clip: float | None) -> Tensor:
    """Return max(-A·r, -A·clip(r, 1-low, 1+high)) with the given ratios, limited by `dual_clip` as in `ppo`."""
    minus_M = -batch.advantages_M
    loss_M = torch.maximum(minus_M * ratio_M, minus_M * ratio_M.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss_M = torch.where(minus_M > 0, torch.minimum(loss_M, minus_M * dual_clip), loss_M)
    return loss_M * batch.mask_M
