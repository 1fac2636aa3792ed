"""Advantages of an external reward: from one number a sample to one number a token.

    R' = clip((R - mean) / (std + 1e-6))          over the sample's group or the whole batch
    A  = clip(whiten(Σ_k γ^k r_{t+k})),           r = whiten(R' on the last action token, 0 elsewhere)

Each part happens only where it is asked for. The teacher's term joins after this (see `opd`): normalising the sum
would erase it.

Legend: B samples, M scored tokens of all samples end to end. Everything is float64: it is small, and sums of many
terms are compared with records to the sixth digit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STD_FLOOR = 1e-6  # GRPO's, arXiv 2402.03300
VARIANCE_FLOOR = 1e-8  # whitening's


@dataclass(frozen=True)
class Normalised:
    """(R - `mean`) / `scale`, all f64 [B]; where nothing is normalised, mean is 0 and scale 1."""

    rewards: Tensor
    mean: Tensor
    scale: Tensor


def normalised_rewards(
    rewards_B: Tensor, groups: Sequence[str], mean_over: str | None, std_over: str | None
) -> Normalised:
    """Normalise rewards over their `group` or the whole `batch`, or (None) not at all.

    Standard deviations are unbiased. A group, or batch, of one keeps its reward as it is.
    """
    rewards_B = rewards_B.double()
    mean_B, scale_B = torch.zeros_like(rewards_B), torch.ones_like(rewards_B)
    families = {"group": _members(groups), "batch": [list(range(len(groups)))]}
    for members in families.get(mean_over, []):
        if len(members) > 1:
            mean_B[members] = rewards_B[members].mean()
    for members in families.get(std_over, []):
        if len(members) > 1:
            scale_B[members] = rewards_B[members].std() + STD_FLOOR
    return Normalised((rewards_B - mean_B) / scale_B, mean_B, scale_B)


def on_last_action(rewards_B: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Put each sample's reward on its last action token, f64 [M]; a sample without one gives nothing."""
    pieces = []
    for reward, mask in zip(rewards_B, masks, strict=True):
        piece = torch.zeros(len(mask), dtype=torch.float64)
        if mask.any():
            piece[int(mask.nonzero()[-1])] = reward
        pieces.append(piece)
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)


def whitening(values_M: Tensor, mask_M: Tensor) -> tuple[float, float]:
    """Mean and standard deviation (unbiased, variance + 1e-8) over the masked tokens; (0, 1) for fewer than two."""
    kept = values_M[mask_M].double()
    if len(kept) < 2:
        return 0.0, 1.0
    return float(kept.mean()), float((kept.var() + VARIANCE_FLOOR).sqrt())


def _members(groups: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        found.setdefault(group, []).append(number)
    return list(found.values())
