"""REINFORCE of the steps of a trajectory, each with what comes after it. Legend: see `batch`."""

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
    """Return a step's reward and those of its later steps, each discounted by step_reward_gamma more. ROLL's.

    Normalised as `mean_cal_level` and `std_cal_level` say, over steps: a trajectory counts as often as it has steps.
    """
    found = normalised_rewards(step_returns(batch, step_reward_gamma), batch.groups, mean_cal_level, std_cal_level)
    return Normalised.given(found.rewards, batch.rewards_B.double())
