"""Advantages of the core: GRPO, and REINFORCE and its relatives without a baseline. Legend: `reward_normalisation`."""

import torch
from torch import Tensor

from roll_opd.objective.advantages.reward_normalisation import (
    Level,
    Normalised,
    RewardBatch,
    group_members,
    normalised_rewards,
)
from roll_opd.objective.registry import register_advantage


@register_advantage("grpo", baseline=True)
def grpo(
    batch: RewardBatch,
    *,
    mean_cal_level: Level = "group",
    std_cal_level: Level = "group",
    std_threshold: float | None = None,
    rank_penalty: float | None = None,
) -> Normalised:
    """Return (R - mean of the group) / (std + 1e-6). arXiv 2402.03300.

    Args:
        mean_cal_level: level of the mean.
        std_cal_level: level of the std. arXiv 2508.08221 proposes the std over the batch. None: rewards are not divided
            by a std, as in Dr. GRPO, arXiv 2503.20783.
        std_threshold: groups whose std is at most this threshold get the advantage 0 and are dropped from the batch.
            Groups of one sample are dropped too.
        rank_penalty: R is multiplied by 1 - rank_penalty · rank/G. The rank orders the answers of a group by the mean
            log-prob of their action tokens. The answer with the lowest mean has rank 0. arXiv 2506.02355.

    Raises:
        ValueError: if rank_penalty is set, but the batch has no log-probs.
    """
    rewards_B = batch.rewards_B.double()
    if rank_penalty is not None:
        rewards_B = rewards_B * (1 - rank_penalty * _ranks(batch))
    found = normalised_rewards(rewards_B, batch.groups, mean_cal_level, std_cal_level)
    if rank_penalty is None and std_threshold is None:
        return found
    dropped_B = torch.zeros(len(rewards_B), dtype=torch.bool)
    if std_threshold is not None:
        for members in group_members(batch.groups):
            dropped_B[members] = len(members) == 1 or bool(rewards_B[members].std() <= std_threshold)
    return Normalised.given(found.rewards.masked_fill(dropped_B, 0.0), batch.rewards_B.double(), dropped_B)


def _ranks(batch: RewardBatch) -> Tensor:
    """Return rank/G of each sample, f64 [B].

    The samples of a group are ranked by the mean log-prob of their action tokens. The lowest mean has rank 0.
    """
    if batch.logprobs is None:
        raise ValueError("rank_penalty of advantage grpo needs the log-probs of the samples, but there are none")
    likely_B = torch.stack([values.double().sum() / max(len(values), 1) for values in batch.logprobs])
    ranks_B = torch.zeros_like(likely_B)
    for members in group_members(batch.groups):
        order = likely_B[members].argsort(stable=True).argsort(stable=True)
        ranks_B[members] = order.double() / len(members)
    return ranks_B


# these four estimators of ROLL differ only in the token advantages: critic values, whitening, discount per turn
@register_advantage("gae", token_defaults={"gamma": 1.0, "lambd": 1.0, "whiten_advantages": True})
@register_advantage("reinforceplusplus", token_defaults={"gamma": 1.0, "whiten_advantages": True})
@register_advantage("agentic_reinforce", discounts_turns=True)
@register_advantage("reinforce")
def reinforce(batch: RewardBatch, *, mean_cal_level: Level = None, std_cal_level: Level = None) -> Normalised:
    """Return R, normalised over groups or over the batch; without levels, R is unchanged.

    `mean_cal_level` and `std_cal_level` correspond to ROLL's norm_mean_type and norm_std_type.
    """
    return normalised_rewards(batch.rewards_B, batch.groups, mean_cal_level, std_cal_level)


@register_advantage("on_policy_distill", token_defaults={})
def on_policy_distill(batch: RewardBatch) -> Normalised:
    """Return 0 for every sample, because rewards are ignored.

    The training signal is the teachers' term, which `objective.opd_loss` adds to each token.
    """
    rewards_B = batch.rewards_B.double()
    return Normalised.given(torch.zeros_like(rewards_B), rewards_B)
