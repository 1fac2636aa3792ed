"""Start a run's roles and rewards, and validate its teachers, together where the devices permit it."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from roll_opd.config.plan import RunPlan
from roll_opd.pipelines.backend import Backend
from roll_opd.pipelines.reward_trial import try_rewards
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.start import starts_beside_measurement
from roll_opd.pipelines.validation_runs import measure_teachers
from roll_opd.roles.reward_pool import RewardPool

T = TypeVar("T")


async def begin(run: Run, backend: Backend) -> RunWorkers:
    """Start and try the rewards, validate the teachers, and start the roles; raise the first failure.

    The validation of the teachers may still be running at the end.
    """
    plan = run.plan
    starting_rewards = asyncio.ensure_future(_start_rewards(run, backend))
    teachers_measured = background_task(measure_teachers(run, starting_rewards))

    async def start_models() -> RunWorkers:
        if any(reward.engine for reward in plan.rewards):
            await starting_rewards  # judges run on engines, which start one after another on a shared device
        if not (plan.rollout and starts_beside_measurement(plan, run.placement)):
            await teachers_measured
        run.logger.note(f"Starting {started(plan)} ...")
        starting = background_task(backend.workers(plan, run.placement))
        await asyncio.wait({starting, teachers_measured}, return_when=asyncio.FIRST_COMPLETED)
        if teachers_measured.done():
            await teachers_measured  # else its failure would be raised only after all have started
        return await starting

    reward_pools, workers = await asyncio.gather(starting_rewards, start_models())
    return replace(workers, reward_pools=reward_pools, teachers_measured=teachers_measured)


def started(plan: RunPlan) -> str:
    """Return the models that a run starts, in words: "student and inference engines"."""
    number = "s" if len(plan.teachers) > 1 else ""
    names = {
        f"teacher{number}": plan.teachers,
        "reference" if plan.rollout else "reference policy": plan.reference,
        "critic": plan.critic,
        "inference engines": plan.rollout,
    }
    *models, last = ["student" if plan.rollout or plan.reference else "the student", *filter(names.get, names)]
    return f"{', '.join(models)} and {last}" if models else last


async def _start_rewards(run: Run, backend: Backend) -> tuple[RewardPool, ...]:
    pools = await backend.reward_pools(run.plan, run.placement)
    if pools:
        await try_rewards(pools, run.source)
    return pools


def background_task(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start a task whose exception is ignored if another task fails first."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task
