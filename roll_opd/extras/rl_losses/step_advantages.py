"""Advantages of the steps of a run: REINFORCE and GRPO. Legend: see `RewardBatch`."""

import torch

from roll_opd.objective.advantages.advantage_functions import grpo
from roll_opd.objective.advantages.reward_normalisation import (
    Level,
    Normalised,
    RewardBatch,
    normalised_rewards,
    run_members,
    step_returns,
)
from roll_opd.objective.registry import register_advantage


@register_advantage("step_reinforce", reads_runs=True, adds_steps=True)
def step_reinforce(
    batch: RewardBatch,
    *,
    mean_cal_level: Level = None,
    std_cal_level: Level = None,
    step_reward_gamma: float = 0.95,
) -> Normalised:
    """Return the discounted return of each step, Σ_k step_reward_gamma^k · R_{t+k}, as in ROLL.

    The mean and the std of the normalisation are taken over steps, so all steps have the same weight.
    """
    found = normalised_rewards(step_returns(batch, step_reward_gamma), batch.groups, mean_cal_level, std_cal_level)
    return Normalised.given(found.rewards, batch.rewards_B.double())


@register_advantage("step_wise_grpo", baseline=True, reads_runs=True)
def step_wise_grpo(
    batch: RewardBatch,
    *,
    std_cal_level: Level = "group",
    std_threshold: float | None = None,
    enable_step_norm: bool = False,
) -> Normalised:
    """Return, for all steps of a run, the `grpo` advantage of the run's last reward, as in Trinity-RFT.

    Each run of a prompt counts once in the mean and the std, whatever its number of steps.

    Args:
        enable_step_norm: whether the advantage is divided by the number of steps of the run.
    """
    steps = run_members(batch)
    rewards_B = batch.rewards_B.double()
    last = RewardBatch(rewards_B[[members[-1] for members in steps.values()]], [group for group, _ in steps])
    found = grpo(last, std_cal_level=std_cal_level, std_threshold=std_threshold)
    advantages_B, dropped_B = torch.zeros_like(rewards_B), torch.zeros(len(rewards_B), dtype=torch.bool)
    for place, members in enumerate(steps.values()):
        score = found.rewards[place]
        advantages_B[members] = score / len(members) if enable_step_norm else score
        dropped_B[members] = found.dropped is not None and found.dropped[place]
    return Normalised.given(advantages_B, rewards_B, dropped_B)
