"""Interface of advantage functions (`RewardBatch` -> `Normalised`), and shared normalisation.

An advantage function is `f(batch, *, arguments) -> Normalised`. It computes (R - mean) / scale for each sample, with
the mean and the scale of the sample's group or of the batch. `returns_and_gae` then computes the advantages of tokens.

The standard deviation is unbiased unless stated otherwise. If a group or batch has only one sample, the reward of this
sample is not changed.

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
    """Normalised rewards: `rewards` is (R - `mean`) / `scale`. All arrays are f64 [B].

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
        """Wrap advantages that were computed without a mean and a scale.

        The scale is set to 1, and the mean is set to the reward minus the advantage.
        """
        return cls(advantages_B, rewards_B - advantages_B, torch.ones_like(rewards_B), dropped_B)


def normalised_rewards(rewards_B: Tensor, groups: Sequence[str], mean_over: Level, std_over: Level) -> Normalised:
    """Normalise rewards over the group, or over the whole batch; without levels, return them unchanged.

    If all rewards of a group or batch are equal, std normalisation returns 0, even if no mean is subtracted. Otherwise
    these rewards would be divided by a small constant and become very large.

    Args:
        mean_over: level at which the mean is computed, "group" or "batch"; None: the mean is not subtracted.
        std_over: level at which the std is computed, "group" or "batch"; None: rewards are not divided by a std.
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
    """Return a dict from (group, run) to the numbers of the run's samples, in order."""
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
    """Return one list per group, with the numbers of the group's samples.

    Args:
        level: with "batch", the whole batch is one group; with None, there are no groups, so the result is empty.
    """
    if level is None:
        return []
    members: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group if level == "group" else "", []).append(number)
    return list(members.values())
