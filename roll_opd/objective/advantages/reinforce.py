"""Advantages without a baseline: REINFORCE, GAE, REINFORCE++, distillation.

Legend: see `batch`.
"""

import torch

from roll_opd.objective.advantages.batch import (
    Level,
    Normalised,
    RewardBatch,
    normalised_rewards,
)
from roll_opd.objective.registry import register_advantage


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

    The training signal is the teachers' term, which `objective.loss` adds to each token.
    """
    rewards_B = batch.rewards_B.double()
    return Normalised.given(torch.zeros_like(rewards_B), rewards_B)
