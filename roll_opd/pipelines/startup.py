"""Start a run: start Ray and the rewards, try the rewards, validate the teachers, and start the roles."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.cluster import runtime
from roll_opd.cluster.multihost.hosts import Hosts
from roll_opd.cluster.placement import Placement
from roll_opd.cluster.startup_progress import StartupProgress
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


class Backend:
    """Starts Ray and workers for one run, and ends them after the run.

    A subclass may keep Ray and the workers for several runs.
    """

    @contextmanager
    def cluster(
        self, plan: RunPlan, starting: StartupProgress, hosts: Hosts | None, logs: Path | None
    ) -> Iterator[None]:
        """Run the Ray cluster of the run inside the block. Its logs are copied to `logs`."""
        with runtime.ray_cluster(plan.devices_per_node, starting, hosts, logs):
            yield

    def devices(self, plan: RunPlan, starting: StartupProgress, hosts: Hosts | None) -> Placement:
        """Return the devices of the cluster."""
        return Placement(
            plan.num_nodes,
            plan.devices_per_node,
            starting,
            deterministic=plan.deterministic,
            addresses=hosts.addresses if hosts else (),
        )

    def complete(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, in the event loop of the workers."""
        asyncio.run(work)

    async def reward_pools(self, plan: RunPlan, placement: Placement) -> tuple[RewardPool, ...]:
        """Start the reward workers."""
        return await start_roles.start_reward_pools(plan, placement)

    async def workers(self, plan: RunPlan, placement: Placement, answers: Path) -> RunWorkers:
        """Start the roles. The answers of teacher servers are stored in the directory `answers`."""
        return await start_roles.start_workers(plan, placement, answers)

    async def end(self, workers: RunWorkers) -> None:
        """End the roles and reward workers after the last step of a run."""
        await workers.end()
        for pool in workers.reward_pools:
            await pool.end()


async def begin(run: Run, backend: Backend) -> RunWorkers:
    """Start the rewards and try them, validate the teachers, and start the roles. Return the roles.

    The validation of the teachers may continue after this function has returned. If several of these tasks fail, the
    first failure is raised.
    """
    plan = run.plan
    starting_rewards = asyncio.ensure_future(_start_rewards(run, backend))
    teachers_measured = background_task(measure_teachers(run, starting_rewards))

    async def start_models() -> RunWorkers:
        if any(reward.engine for reward in plan.rewards):
            await starting_rewards  # engines on a shared device start one after another, and judges have engines
        if not (plan.rollout and starts_beside_measurement(plan, run.placement)):
            await teachers_measured
        run.logger.note(f"Starting {started(plan)} ...")
        starting = background_task(backend.workers(plan, run.placement, run.checkpoints.directory.teacher_answers))
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


async def _start_rewards(run: Run, backend: Backend) -> tuple[RewardPool, ...]:
    pools = await backend.reward_pools(run.plan, run.placement)
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
