"""Every reward is called once while the engines start: one that cannot work would else be found a minute later."""

import asyncio
from collections.abc import Sequence

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.data.dataset import Prompt
from roll_opd.data.prompt_source import TaskSource
from roll_opd.rewards.reward_registry import REWARDS
from roll_opd.roles.reward_pool import RewardPool
from roll_opd.samples.experience import Experience

PROMPTS_SEEN = 64  # of the first ones, among which a domain's is looked for
SECONDS = 10.0  # a reward that takes longer is not waited for


async def try_rewards(pools: Sequence[RewardPool], source: TaskSource) -> None:
    """Have each pool score the first prompt of its domain, answered with the prompt itself.

    RunError where that fails and a sample's failure ends the run. What is sent to a service is not tried: it costs.
    """
    prompts = source.peek(PROMPTS_SEEN)
    chosen = ((pool, next((p for p in prompts if pool.plan.accepts(p.tag)), None)) for pool in pools)
    await asyncio.gather(*[_try(pool, prompt) for pool, prompt in chosen if prompt and not _asks_a_service(pool)])


async def _try(pool: RewardPool, prompt: Prompt) -> None:
    answer = pool.submit(_echo(prompt))
    try:
        await asyncio.wait([answer], timeout=SECONDS)
        if answer.done():
            answer.result()
    except RunError as error:
        raise RunError(f"tried before the first step, on the text of the first prompt: {error}") from error
    finally:
        answer.cancel()
        pool.drain_metrics()


def _asks_a_service(pool: RewardPool) -> bool:
    return any(REWARDS.facts(term.worker).asks_a_service for term in pool.plan.terms)


def _echo(prompt: Prompt) -> Experience:
    return Experience(
        id=prompt.id,
        group_id=prompt.id,
        tag=prompt.tag,
        domain="",
        tokens=np.concatenate([prompt.tokens, prompt.tokens]),
        prompt_length=len(prompt.tokens),
        action_mask=np.ones(len(prompt.tokens), dtype=bool),
        rollout_logprobs=np.zeros(len(prompt.tokens), dtype=np.float32),
        finish_reason="stop",
        ground_truth=prompt.ground_truth,
        extra=prompt.extra,
    )
