"""How often a sampler answers held-out prompts correctly, by the reward_pools' word."""

from collections.abc import Sequence
from dataclasses import replace

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.experience import Experience
from roll_opd.data.source import Prompt
from roll_opd.rollout.pending_rewards import PendingRewards
from roll_opd.rollout.scheduler import FrozenModels, roll_out
from roll_opd.tracking.clock import PhaseClock
from roll_opd.tracking.metrics import validation_metrics
from roll_opd.workers.reward_pool import RewardPool
from roll_opd.workers.roles import Sampler

VALIDATION_DRAW = 2**31  # draws of validation samples start here, far from those of training


async def validate(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    sampling: SamplingPlan,
    reward_pools: Sequence[RewardPool],
    *,
    seed: int,
    chunk_samples: int,
    clock: PhaseClock,
) -> dict[str, float]:
    """Return the metrics of `validation_metrics` for `sampling.n` answers a prompt."""
    pending_rewards = PendingRewards(reward_pools)
    with clock.phase("validate"):
        selection = await roll_out(
            prompts,
            sampler,
            sampling,
            FrozenModels(),
            pending_rewards,
            first_draw=VALIDATION_DRAW,
            seed=seed,
            chunk_samples=chunk_samples,
            clock=clock,
        )
        answers = await pending_rewards.answered(selection.experiences())
    return validation_metrics([_by_main_reward(answer, reward_pools) for answer in answers], sampling.n)


def _by_main_reward(answer: Experience, reward_pools: Sequence[RewardPool]) -> Experience:
    """An answer is right or wrong by its domain's own reward: what is added to it, and its weight, are for training."""
    plan = next((pool.plan for pool in reward_pools if pool.plan.domain == answer.domain), None)
    if plan is None or not plan.is_weighted or plan.terms[0].name not in answer.reward_parts:
        return answer
    return replace(answer, reward=answer.reward_parts[plan.terms[0].name])
