"""How often a sampler answers held-out prompts correctly, by their rewards."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from roll_opd.data.experience import Experience
from roll_opd.data.source import Prompt
from roll_opd.rollout.batch import PendingRewards, Rollout, roll_out
from roll_opd.tracking.metrics import validation_metrics
from roll_opd.workers.reward_pool import RewardPool

VALIDATION_DRAW = 2**31  # draws of validation samples start here, far from those of training


async def validate(rollout: Rollout, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Return the metrics of `validation_metrics` for `rollout.sampling.n` answers a prompt."""
    rewards = PendingRewards(rollout)
    async with aclosing(roll_out(rollout, prompts, rewards, VALIDATION_DRAW)) as samples:
        by_number = {number: experience async for number, experience in samples}
    answers = await rewards.added_to([by_number[number] for number in range(len(by_number))])
    return validation_metrics([_by_main_reward(e, rollout.reward_pools) for e in answers], rollout.sampling.n)


def _by_main_reward(answer: Experience, reward_pools: Sequence[RewardPool]) -> Experience:
    """An answer is right or wrong by its domain's own reward: what is added to it, and its weight, are for training."""
    plan = next((pool.plan for pool in reward_pools if pool.plan.domain == answer.domain), None)
    if plan is None or not plan.is_weighted or plan.terms[0].name not in answer.reward_parts:
        return answer
    return replace(answer, reward=answer.reward_parts[plan.terms[0].name])
