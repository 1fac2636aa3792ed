"""How a run that rolls out begins: rewards, roles, and a look at how well teachers answer, side by side if possible."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from roll_opd.config.plan import RunPlan
from roll_opd.pipelines.loop import Run
from roll_opd.pipelines.reward_trial import try_rewards
from roll_opd.pipelines.start import RunWorkers, start_reward_pools, start_workers, starts_beside_measurement
from roll_opd.pipelines.validation_runs import Measuring
from roll_opd.roles.reward_pool import RewardPool

T = TypeVar("T")


@dataclass(frozen=True)
class Begun:
    """What is up. The teachers may still be answering: `teachers_measured` raises what goes wrong there."""

    reward_pools: tuple[RewardPool, ...]
    workers: RunWorkers
    measuring: Measuring
    teachers_measured: "asyncio.Task[None]"


async def begin(run: Run) -> Begun:
    """Start the rewards, and try each of them; measure the teachers; start the roles. The first failure is raised."""
    plan = run.plan
    starting_rewards = asyncio.ensure_future(_start_rewards(run))
    measuring = Measuring(run, starting_rewards)
    teachers_measured = _told_once(measuring.measure_teachers())

    async def start_models() -> RunWorkers:
        if any(reward.engine for reward in plan.rewards):
            await starting_rewards  # judges run on engines, and those that share a device start one after another
        if not starts_beside_measurement(plan, run.placement):
            await teachers_measured
        run.logger.note(f"Starting {started(plan)} ...")
        starting = _told_once(start_workers(plan, run.placement))
        await asyncio.wait({starting, teachers_measured}, return_when=asyncio.FIRST_COMPLETED)
        if teachers_measured.done():
            await teachers_measured  # or its failure would be told when all have started
        return await starting

    reward_pools, workers = await asyncio.gather(starting_rewards, start_models())
    return Begun(reward_pools, workers, measuring, teachers_measured)


def started(plan: RunPlan) -> str:
    """Return which models a run starts, in words: "student and inference engines"."""
    roles = {"teacher": plan.teachers, "reference": plan.reference, "critic": plan.critic}
    number = "s" if len(plan.teachers) > 1 else ""
    models = ["student", *(f"{role}{number * (role == 'teacher')}" for role, there in roles.items() if there)]
    return f"{', '.join(models)} and inference engines"


async def _start_rewards(run: Run) -> tuple[RewardPool, ...]:
    pools = await start_reward_pools(run.plan, run.placement)
    await try_rewards(pools, run.source)
    return pools


def _told_once(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Begin `work`, whose failure is nobody's business where that of other work ends the run first."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task
