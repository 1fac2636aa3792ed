"""Interface of advantage functions (`RewardBatch` -> `Normalised`), and shared normalisation.

An advantage function is `f(batch, *, arguments) -> Normalised`. It returns the reward of each sample relative to its
group or batch, (R - mean) / scale; `token_advantages` computes the advantages of tokens from these relative rewards.
The standard deviation is unbiased unless stated otherwise. In a group or batch of one sample, the reward is not
changed.

Legend: B samples. All arrays are float64, because they are small and tests compare six digits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

STD_FLOOR = 1e-6  # GRPO's, arXiv 2402.03300
Level = Literal["group", "batch"] | None  # None: no normalisation


@dataclass(frozen=True)
class RewardBatch:
    """Rewards, groups and runs of a step's samples."""

    rewards_B: Tensor  # f64
    groups: Sequence[str]  # samples of one prompt share a group
    logprobs: Sequence[Tensor] | None = None  # rollout log-probs of each sample's action tokens
    runs: Sequence[int] | None = None  # steps of a trajectory have the same run, in order; None: each sample is a run
    # steps of a prompt that start from the same state have equal strings; None: unknown
    states: Sequence[str] | None = None


@dataclass(frozen=True)
class Normalised:
    """Normalised rewards (R - `mean`) / `scale`; all arrays are f64 [B].

    Without normalisation, the mean is 0 and the scale is 1.
    """

    rewards: Tensor
    mean: Tensor
    scale: Tensor
    dropped: Tensor | None = None  # bool [B], true for samples removed from the batch; None: no sample is removed

    def at(self, numbers: Sequence[int]) -> "Normalised":
        """Return the rewards, means and scales of the samples with the given numbers."""
        return Normalised(self.rewards[numbers], self.mean[numbers], self.scale[numbers])

    @classmethod
    def of(cls, rewards_B: Tensor, mean_B: Tensor, scale_B: Tensor | None = None) -> "Normalised":
        """Return (R - mean) / scale. Without `scale_B`, the scale is 1."""
        scale_B = torch.ones_like(rewards_B) if scale_B is None else scale_B
        return cls((rewards_B - mean_B) / scale_B, mean_B, scale_B)

    @classmethod
    def given(cls, advantages_B: Tensor, rewards_B: Tensor, dropped_B: Tensor | None = None) -> "Normalised":
        """Wrap arbitrary advantages: the mean is the reward minus the advantage, and the scale is 1."""
        return cls(advantages_B, rewards_B - advantages_B, torch.ones_like(rewards_B), dropped_B)


def normalised_rewards(rewards_B: Tensor, groups: Sequence[str], mean_over: Level, std_over: Level) -> Normalised:
    """Normalise rewards over their `group`, the whole `batch`, or nothing (None).

    If all rewards of a group or batch are equal, std normalisation returns 0, whatever `mean_over` is. A division by
    the small constant alone would give these rewards the largest advantages.
    """
    rewards_B = rewards_B.double()
    mean_B, scale_B = torch.zeros_like(rewards_B), torch.ones_like(rewards_B)
    for members in group_members(groups, mean_over):
        if len(members) > 1:
            mean_B[members] = rewards_B[members].mean()
    for members in group_members(groups, std_over):
        if len(members) > 1:
            scale_B[members] = rewards_B[members].std() + STD_FLOOR
            if scale_B[members[0]] <= 2 * STD_FLOOR:
                mean_B[members] = rewards_B[members]
    return Normalised.of(rewards_B, mean_B, scale_B)


def run_members(batch: RewardBatch) -> dict[tuple[str, int], list[int]]:
    """Return the sample numbers of each run, in order; the keys are pairs (group, run)."""
    numbers = range(len(batch.groups)) if batch.runs is None else batch.runs
    members: dict[tuple[str, int], list[int]] = {}
    for place, run in enumerate(zip(batch.groups, numbers, strict=True)):
        members.setdefault(run, []).append(place)
    return members


def step_returns(batch: RewardBatch, discount: float) -> Tensor:
    """Return G_t = R_t + discount · G_{t+1} over the steps of each run, f64 [B]."""
    returns_B = batch.rewards_B.double().clone()
    for members in run_members(batch).values():
        for step, following in zip(members[-2::-1], members[:0:-1], strict=True):
            returns_B[step] += discount * returns_B[following]
    return returns_B


def group_members(groups: Sequence[str], level: Level = "group") -> list[list[int]]:
    """Return one list per group with the numbers of its samples.

    With `level` batch, the whole batch is one group. With `level` None, there are no groups, so the result is empty.
    """
    if level is None:
        return []
    members: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group if level == "group" else "", []).append(number)
    return list(members.values())
