"""What an advantage function reads and returns, and the normalisation that several of them share.

An advantage function is `f(batch, *, its own arguments) -> Normalised`: what a sample's reward is worth beside those of
its group or batch, (R - mean) / scale, a number a sample; `token_advantages` takes it from there to the tokens. The
standard deviation is unbiased unless said otherwise. A group, or batch, of one has nothing to be compared with: its
reward stays as it is.

Legend: B samples. Everything is float64: it is small, and compared with records to the sixth digit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

STD_FLOOR = 1e-6  # GRPO's, arXiv 2402.03300
Level = Literal["group", "batch"] | None  # None: not at all


@dataclass(frozen=True)
class RewardBatch:
    """The samples of a step."""

    rewards_B: Tensor  # f64
    groups: Sequence[str]  # samples of one prompt share a group
    logprobs: Sequence[Tensor] | None = None  # of each sample's action tokens under the weights that wrote them
    runs: Sequence[int] | None = None  # steps of one trajectory share a run, in their order; None: each sample is one
    states: Sequence[str] | None = None  # steps that began alike, of one prompt, share a state; None: not known


@dataclass(frozen=True)
class Normalised:
    """`rewards` = (R - `mean`) / `scale`, all f64 [B]; where nothing is normalised, mean is 0 and scale 1."""

    rewards: Tensor
    mean: Tensor
    scale: Tensor
    dropped: Tensor | None = None  # bool [B], samples that leave the batch as if they were never sampled; None: none

    def at(self, numbers: Sequence[int]) -> "Normalised":
        """Return these samples' alone."""
        return Normalised(self.rewards[numbers], self.mean[numbers], self.scale[numbers])

    @classmethod
    def of(cls, rewards_B: Tensor, mean_B: Tensor, scale_B: Tensor | None = None) -> "Normalised":
        """Return (R - mean) / scale; without `scale_B`, R - mean."""
        scale_B = torch.ones_like(rewards_B) if scale_B is None else scale_B
        return cls((rewards_B - mean_B) / scale_B, mean_B, scale_B)

    @classmethod
    def given(cls, advantages_B: Tensor, rewards_B: Tensor, dropped_B: Tensor | None = None) -> "Normalised":
        """Return advantages that are no such quotient: the mean is their difference from the reward, the scale 1."""
        return cls(advantages_B, rewards_B - advantages_B, torch.ones_like(rewards_B), dropped_B)


def normalised_rewards(rewards_B: Tensor, groups: Sequence[str], mean_over: Level, std_over: Level) -> Normalised:
    """Normalise rewards over their `group` or the whole `batch`, or (None) not at all.

    Rewards that do not differ where a deviation is asked for are worth 0, whatever mean is subtracted: to divide by
    what is left would make them the largest of all.
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
    """Return the numbers of the samples of each run, by its group and its own number, both in their order."""
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
    """Return the numbers of the samples that are compared with each other, a list for each group (or for the batch)."""
    if level is None:
        return []
    members: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group if level == "group" else "", []).append(number)
    return list(members.values())
