"""Start a run: start Ray and the rewards, try the rewards, validate the teachers, and start the roles."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.config.plan import RunPlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.prompt_source import TaskSource
from roll_opd.pipelines import start_roles
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.start_roles import starts_beside_measurement
from roll_opd.pipelines.validation_runs import measure_teachers
from roll_opd.rewards.reward_registry import REWARDS
from roll_opd.samples.sample import Sample
from roll_opd.workers.reward_pool import RewardPool

T = TypeVar("T")


async def begin(run: Run) -> RunWorkers:
    """Start the rewards and try them, validate the teachers, and start the roles. Return the roles.

    The validation of the teachers may continue after this function has returned. If several of these tasks fail, the
    first failure is raised.
    """
    plan = run.plan
    starting_rewards = asyncio.ensure_future(_start_rewards(run))
    teachers_measured = background_task(measure_teachers(run, starting_rewards))

    async def start_models() -> RunWorkers:
        if any(reward.engine for reward in plan.rewards):
            await starting_rewards  # engines on a shared device start one after another, and judges have engines
        if not (plan.rollout and starts_beside_measurement(plan, run.placement)):
            await teachers_measured
        run.logger.note(f"Starting {started(plan)} ...")
        starting = background_task(
            start_roles.start_workers(plan, run.placement, run.checkpoints.directory.teacher_answers)
        )
        await asyncio.wait({starting, teachers_measured}, return_when=asyncio.FIRST_COMPLETED)
        if teachers_measured.done():
            await teachers_measured  # otherwise a failure would be raised only after all roles have started
        return await starting

    reward_pools, workers = await asyncio.gather(starting_rewards, start_models())
    return replace(workers, reward_pools=reward_pools, teachers_measured=teachers_measured)


def started(plan: RunPlan) -> str:
    """Return the names of the models that a run starts as text, for example "student and inference engines"."""
    number = "s" if len(plan.teachers) > 1 else ""
    names = {
        f"teacher{number}": plan.teachers,
        "reference" if plan.rollout else "reference policy": plan.reference,
        "critic": plan.critic,
        "inference engines": plan.rollout,
    }
    *models, last = ["student" if plan.rollout or plan.reference else "the student", *filter(names.get, names)]
    return f"{', '.join(models)} and {last}" if models else last


async def _start_rewards(run: Run) -> tuple[RewardPool, ...]:
    pools = await start_roles.start_reward_pools(run.plan, run.placement)
    if pools:
        await try_rewards(pools, run.source)
    return pools


def background_task(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start a task. Its exception is not reported as unhandled if another task fails first."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


TRIAL_PROMPTS = 64  # a prompt of each domain is looked for among the first prompts
TRIAL_SECONDS = 10.0  # time limit for trying a reward


async def try_rewards(pools: Sequence[RewardPool], source: TaskSource) -> None:
    """Let each reward pool score the first prompt of its domain, with the prompt itself as the response.

    Raises RunError if scoring fails and `on_error` is `stop`. A reward that calls a service is not tried, because calls
    cost money.
    """
    prompts = source.peek(TRIAL_PROMPTS)
    chosen = ((pool, next((p for p in prompts if pool.plan.accepts(p.tag)), None)) for pool in pools)
    await asyncio.gather(*[_try(pool, prompt) for pool, prompt in chosen if prompt and not _calls_a_service(pool)])


async def _try(pool: RewardPool, prompt: Prompt) -> None:
    answer = pool.submit(_echo(prompt))
    try:
        await asyncio.wait([answer], timeout=TRIAL_SECONDS)
        if answer.done():
            answer.result()
    except RunError as error:
        raise RunError(f"failed when tried before the first step, on the text of the first prompt: {error}") from error
    finally:
        answer.cancel()
        pool.drain_metrics()


def _calls_a_service(pool: RewardPool) -> bool:
    return any(REWARDS.facts(term.worker).asks_a_service for term in pool.plan.terms)


def _echo(prompt: Prompt) -> Sample:
    columns = {
        "action_mask": np.ones(len(prompt.tokens), dtype=bool),
        "rollout_logprobs": np.zeros(len(prompt.tokens), dtype=np.float32),
    }
    return Sample(
        np.concatenate([prompt.tokens, prompt.tokens]),
        len(prompt.tokens),
        columns,
        id=prompt.id,
        group_id=prompt.id,
        tag=prompt.tag,
        ground_truth=prompt.ground_truth,
        extra=prompt.extra,
    )
