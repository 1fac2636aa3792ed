"""Baseline advantages: the reward minus a baseline of its group (RLOO, OPMD, AsymRE, REC).

Legend: see `RewardBatch`.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from roll_opd.objective.advantages.reward_normalisation import STD_FLOOR, Normalised, RewardBatch, group_members
from roll_opd.objective.registry import register_advantage


@register_advantage("rloo", baseline=True)
def rloo(batch: RewardBatch) -> Normalised:
    """Return R minus the mean of the other rewards in the group: (R - mean) · G/(G-1). arXiv 2402.14740."""
    return _minus(batch, lambda rewards: (rewards.sum() - rewards) / (len(rewards) - 1))


@register_advantage("opmd", baseline=True)
def opmd(batch: RewardBatch, *, opmd_baseline: Literal["mean", "logavgexp"] = "mean", tau: float = 1.0) -> Normalised:
    """Return R - baseline. Trinity-RFT, arXiv 2505.17826.

    The baseline is either the group's mean or τ·(logsumexp(R/τ) - log G).
    """
    if opmd_baseline not in ("mean", "logavgexp"):
        raise ValueError(f"opmd_baseline {opmd_baseline!r} is unknown; use mean or logavgexp")

    def baseline(rewards: Tensor) -> Tensor:
        if opmd_baseline == "mean":
            return rewards.mean()
        return tau * (torch.logsumexp(rewards / tau, 0) - torch.tensor(len(rewards), dtype=rewards.dtype).log())

    return _minus(batch, baseline)


@register_advantage("asymre", baseline=True)
def asymre(batch: RewardBatch, *, baseline_shift: float = -0.1) -> Normalised:
    """Return R - (mean + shift). arXiv 2506.20520.

    With a negative shift, failures have less weight than successes.
    """
    return _minus(batch, lambda rewards: rewards.mean() + baseline_shift)


@register_advantage("rec", baseline=True)
def rec(batch: RewardBatch, *, std_normalize: bool = False, drop: Literal["balance"] | None = None) -> Normalised:
    """Return R - mean. arXiv 2509.24203.

    Args:
        std_normalize: whether R - mean is divided by (biased std + 1e-6).
        drop: "balance" drops samples whose reward is below the group's mean, until at most half of the remaining
            samples are below this mean. The last samples of the group are dropped first. A dropped sample gets the
            advantage 0. Its reward is not included in the mean and the std.
    """
    if drop not in (None, "balance"):
        raise ValueError(f"drop {drop!r} of advantage rec is unknown; use balance, or do not set drop")
    rewards_B = batch.rewards_B.double()
    mean_B, scale_B = torch.zeros_like(rewards_B), torch.ones_like(rewards_B)
    for members in group_members(batch.groups):
        kept = members
        if drop == "balance" and len(members) > 1:
            mean = rewards_B[members].mean()
            below = [number for number in members if rewards_B[number] < mean]
            surplus = max(2 * len(below) - len(members), 0)
            left_out = set(below[len(below) - surplus :])
            kept = [number for number in members if number not in left_out]
            mean_B[sorted(left_out)] = rewards_B[sorted(left_out)]
        if len(kept) > 1:
            mean_B[kept] = rewards_B[kept].mean()
            if std_normalize:
                scale_B[kept] = rewards_B[kept].std(correction=0) + STD_FLOOR
    return Normalised.of(rewards_B, mean_B, scale_B)


def _minus(batch: RewardBatch, baseline: Callable[[Tensor], Tensor]) -> Normalised:
    rewards_B = batch.rewards_B.double()
    baseline_B = torch.zeros_like(rewards_B)
    for members in group_members(batch.groups):
        if len(members) > 1:
            baseline_B[members] = baseline(rewards_B[members])
    return Normalised.of(rewards_B, baseline_B)
