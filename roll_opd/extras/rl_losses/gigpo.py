"""GiGPO: the advantage of a trajectory in its group, plus the advantage of a step relative to its state.

Legend: see `RewardBatch`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from roll_opd.objective.advantages.reward_normalisation import (
    STD_FLOOR,
    Level,
    Normalised,
    RewardBatch,
    group_members,
    normalised_rewards,
    run_members,
    step_returns,
)
from roll_opd.objective.registry import register_advantage


@register_advantage("gigpo", baseline=True, reads_runs=True, reads_states=True, adds_steps=True)
def gigpo(
    batch: RewardBatch,
    *,
    mean_cal_level: Level = "group",
    std_cal_level: Level = None,
    step_reward_gamma: float = 0.95,
    episode_reward_weight: float = 1.0,
    step_reward_weight: float = 1.0,
) -> Normalised:
    """Return episode_reward_weight · A_E + step_reward_weight · A_S for each step. arXiv 2505.10978; ROLL's defaults.

    A_E is the sum of the rewards of the step's trajectory, normalised over trajectories.

    A_S is the return of the step, with the discount step_reward_gamma. It is normalised over all steps of the prompt's
    trajectories that start from the same state. If no other step starts from this state, A_S is 0. With std
    normalisation, A_S is also 0 if all steps that start from this state have equal returns.

    Args:
        mean_cal_level: level of the mean that is subtracted in A_E; None: no mean is subtracted in A_E and A_S.
        std_cal_level: level of the std that divides A_E; None: A_E and A_S are not divided by a std.
        step_reward_gamma: discount of the rewards of later steps, per step.
        episode_reward_weight: weight of A_E.
        step_reward_weight: weight of A_S.

    Raises:
        ValueError: if the states are unknown.
    """
    if batch.states is None:
        raise ValueError("advantage gigpo compares steps with equal states, but the states of the samples are unknown")
    runs = run_members(batch)
    rewards_B = batch.rewards_B.double()
    sums_R = torch.stack([rewards_B[members].sum() for members in runs.values()]) if runs else rewards_B
    found = normalised_rewards(sums_R, [group for group, _ in runs], mean_cal_level, std_cal_level)
    episode_B = torch.zeros_like(rewards_B)
    for place, members in enumerate(runs.values()):
        episode_B[members] = found.rewards[place]
    returns_B = step_returns(batch, step_reward_gamma)
    step_B = _relative_to_state(returns_B, batch.states, mean_cal_level is not None, std_cal_level is not None)
    return Normalised.given(episode_reward_weight * episode_B + step_reward_weight * step_B, rewards_B)


def _relative_to_state(returns_B: Tensor, states: Sequence[str], centred: bool, scaled: bool) -> Tensor:
    if not (centred or scaled):
        return returns_B
    found_B = torch.zeros_like(returns_B)
    for members in group_members(states):
        own = returns_B[members]
        if len(members) > 1 and not (scaled and own.std() <= STD_FLOOR):  # equal returns get 0, like a unique state
            scale = own.std() + STD_FLOOR if scaled else 1.0
            found_B[members] = (own - (own.mean() if centred else 0.0)) / scale
    return found_B
