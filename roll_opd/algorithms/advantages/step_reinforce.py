"""Step-wise REINFORCE: discounted returns over the steps of a trajectory. Legend: see `batch`."""

from roll_opd.algorithms.advantages.batch import Level, Normalised, RewardBatch, normalised_rewards, step_returns
from roll_opd.algorithms.registry import register_advantage


@register_advantage("step_reinforce", reads_runs=True, adds_steps=True)
def step_reinforce(
    batch: RewardBatch,
    *,
    mean_cal_level: Level = None,
    std_cal_level: Level = None,
    step_reward_gamma: float = 0.95,
) -> Normalised:
    """Return the discounted return of each step, Σ_k step_reward_gamma^k · R_{t+k}, as in ROLL.

    `mean_cal_level` and `std_cal_level` normalise over steps, so a trajectory counts once per step.
    """
    found = normalised_rewards(step_returns(batch, step_reward_gamma), batch.groups, mean_cal_level, std_cal_level)
    return Normalised.given(found.rewards, batch.rewards_B.double())
