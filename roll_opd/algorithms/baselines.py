"""What a sample's reward is worth beside those of its group or batch: (R - mean) / scale, a number a sample.

An advantage function is `f(batch, *, its own arguments) -> Normalised`; `advantages.token_advantages` takes it from
there to the tokens. The standard deviation is unbiased unless said otherwise. A group, or batch, of one has nothing
to be compared with: its reward stays as it is.

Legend: B samples. Everything is float64: it is small, and compared with records to the sixth digit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll_opd.config.algorithms import ADVANTAGE_FUNCTIONS

STD_FLOOR = 1e-6  # GRPO's, arXiv 2402.03300
Level = Literal["group", "batch"] | None  # None: not at all


@dataclass(frozen=True)
class RewardBatch:
    """The samples of a step."""

    rewards_B: Tensor  # f64
    groups: Sequence[str]  # samples of one prompt share a group
    logprobs: Sequence[Tensor] | None = None  # of each sample's action tokens under the weights that wrote them
    runs: Sequence[str] | None = None  # steps of one trajectory share a run, in their order; None: each sample is one


@dataclass(frozen=True)
class Normalised:
    """`rewards` = (R - `mean`) / `scale`, all f64 [B]; where nothing is normalised, mean is 0 and scale 1."""

    rewards: Tensor
    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, rewards_B: Tensor, mean_B: Tensor, scale_B: Tensor | None = None) -> "Normalised":
        """(R - mean) / scale."""
        scale_B = torch.ones_like(rewards_B) if scale_B is None else scale_B
        return cls((rewards_B - mean_B) / scale_B, mean_B, scale_B)

    @classmethod
    def given(cls, advantages_B: Tensor, rewards_B: Tensor) -> "Normalised":
        """Whatever was computed, as a difference from the reward."""
        return cls(advantages_B, rewards_B - advantages_B, torch.ones_like(rewards_B))


def normalised_rewards(rewards_B: Tensor, groups: Sequence[str], mean_over: Level, std_over: Level) -> Normalised:
    """Normalise rewards over their `group` or the whole `batch`, or (None) not at all."""
    rewards_B = rewards_B.double()
    mean_B, scale_B = torch.zeros_like(rewards_B), torch.ones_like(rewards_B)
    for members in _families(groups, mean_over):
        if len(members) > 1:
            mean_B[members] = rewards_B[members].mean()
    for members in _families(groups, std_over):
        if len(members) > 1:
            scale_B[members] = rewards_B[members].std() + STD_FLOOR
    return Normalised.of(rewards_B, mean_B, scale_B)


def reinforce(batch: RewardBatch, *, mean_cal_level: Level = None, std_cal_level: Level = None) -> Normalised:
    """R; with ROLL's norm_mean_type and norm_std_type, normalised as they say."""
    return normalised_rewards(batch.rewards_B, batch.groups, mean_cal_level, std_cal_level)


def grpo(
    batch: RewardBatch,
    *,
    mean_cal_level: Level = "group",
    std_cal_level: Level = "group",
    std_threshold: float | None = None,
    rank_penalty: float | None = None,
) -> Normalised:
    """(R - mean of the group) / (std + 1e-6). arXiv 2402.03300.

    Args:
        mean_cal_level, std_cal_level: over what; std over the `batch`: arXiv 2508.08221, None: Dr. GRPO, 2503.20783.
        std_threshold: groups whose rewards deviate by no more than this, and groups of one, teach nothing: 0.
        rank_penalty: R · (1 - rank_penalty · rank/G) for R, rank 0 … G-1 in the group from the least to the most likely
            answer (mean log-prob of its action tokens). arXiv 2506.02355.

    Raises:
        ValueError: for a rank_penalty without log-probs.
    """
    rewards_B = batch.rewards_B.double()
    if rank_penalty is not None:
        rewards_B = rewards_B * (1 - rank_penalty * _ranks(batch))
    found = normalised_rewards(rewards_B, batch.groups, mean_cal_level, std_cal_level)
    if rank_penalty is None and std_threshold is None:
        return found
    advantages_B = found.rewards
    if std_threshold is not None:
        for members in _families(batch.groups):
            if len(members) == 1 or rewards_B[members].std() <= std_threshold:
                advantages_B[members] = 0.0
    return Normalised.given(advantages_B, batch.rewards_B.double())


def step_wise_grpo(
    batch: RewardBatch,
    *,
    std_cal_level: Level = "group",
    std_threshold: float | None = None,
    enable_step_norm: bool = False,
) -> Normalised:
    """`grpo` of the reward of each run's last step, given to all its steps; divided by their count if asked.

    Trinity-RFT. Every run of a prompt counts once, whatever its number of steps.
    """
    names = range(len(batch.groups)) if batch.runs is None else batch.runs
    steps: dict[tuple, list[int]] = {}
    for number, run in enumerate(zip(batch.groups, names, strict=True)):
        steps.setdefault(run, []).append(number)
    rewards_B = batch.rewards_B.double()
    last = RewardBatch(rewards_B[[members[-1] for members in steps.values()]], [group for group, _ in steps])
    scores = grpo(last, std_cal_level=std_cal_level, std_threshold=std_threshold).rewards
    advantages_B = torch.zeros_like(rewards_B)
    for score, members in zip(scores, steps.values(), strict=True):
        advantages_B[members] = score / len(members) if enable_step_norm else score
    return Normalised.given(advantages_B, rewards_B)


def rloo(batch: RewardBatch) -> Normalised:
    """R minus the mean of the others of its group: (R - mean) · G/(G-1). arXiv 2402.14740."""
    rewards_B = batch.rewards_B.double()
    others_B = torch.zeros_like(rewards_B)
    for members in _families(batch.groups):
        if len(members) > 1:
            others_B[members] = (rewards_B[members].sum() - rewards_B[members]) / (len(members) - 1)
    return Normalised.of(rewards_B, others_B)


def opmd(batch: RewardBatch, *, opmd_baseline: Literal["mean", "logavgexp"] = "mean", tau: float = 1.0) -> Normalised:
    """R - baseline: the group's mean, or τ · (logsumexp(R/τ) - log G). Trinity-RFT, arXiv 2505.17826."""
    if opmd_baseline not in ("mean", "logavgexp"):
        raise ValueError(f"opmd_baseline {opmd_baseline!r} is unknown; use mean or logavgexp")

    def baseline(rewards: Tensor) -> Tensor:
        if opmd_baseline == "mean":
            return rewards.mean()
        return tau * (torch.logsumexp(rewards / tau, 0) - torch.tensor(len(rewards), dtype=rewards.dtype).log())

    return _minus(batch, baseline)


def asymre(batch: RewardBatch, *, baseline_shift: float = -0.1) -> Normalised:
    """R - (mean + shift): below the mean, failures weigh less than successes. arXiv 2506.20520."""
    return _minus(batch, lambda rewards: rewards.mean() + baseline_shift)


def rec(batch: RewardBatch, *, std_normalize: bool = False, drop: Literal["balance"] | None = None) -> Normalised:
    """R - mean, with `std_normalize` over (biased std + 1e-6). arXiv 2509.24203.

    With `drop` balance, a group with more samples below its mean than not leaves out as many of them as are too many,
    from its end; they get 0, and mean and std are those of the rest.
    """
    if drop not in (None, "balance"):
        raise ValueError(f"drop {drop!r} of advantage rec is unknown; use balance or nothing")
    rewards_B = batch.rewards_B.double()
    mean_B, scale_B = torch.zeros_like(rewards_B), torch.ones_like(rewards_B)
    for members in _families(batch.groups):
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
    for members in _families(batch.groups):
        if len(members) > 1:
            baseline_B[members] = baseline(rewards_B[members])
    return Normalised.of(rewards_B, baseline_B)


def _ranks(batch: RewardBatch) -> Tensor:
    """rank/G of each sample in its group, f64 [B], by the mean log-prob of its action tokens."""
    if batch.logprobs is None:
        raise ValueError("rank_penalty of advantage grpo reads the log-probs of the samples, and there are none")
    likely_B = torch.stack([values.double().sum() / max(len(values), 1) for values in batch.logprobs])
    ranks_B = torch.zeros_like(likely_B)
    for members in _families(batch.groups):
        order = likely_B[members].argsort(stable=True).argsort(stable=True)
        ranks_B[members] = order.double() / len(members)
    return ranks_B


def _families(groups: Sequence[str], level: Level = "group") -> list[list[int]]:
    """Return the sample numbers that are compared with each other."""
    if level is None:
        return []
    found: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        found.setdefault(group if level == "group" else "", []).append(number)
    return list(found.values())


Advantage = Callable[..., Normalised]  # (RewardBatch, **arguments)

ADVANTAGES: dict[str, Advantage] = {
    "reinforce": reinforce,
    "reinforceplusplus": reinforce,  # differs in what happens to the tokens: whitened
    "grpo": grpo,
    "step_wise_grpo": step_wise_grpo,
    "rloo": rloo,
    "opmd": opmd,
    "asymre": asymre,
    "rec": rec,
    "gae": reinforce,  # likewise: the critic's values
}
for _name, _function in ADVANTAGES.items():
    ADVANTAGE_FUNCTIONS.register(_name)(_function)
