"""Brings a plan's roles to life on the cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from transformers import AutoConfig

from roll_opd.cluster.group import WorkerGroup
from roll_opd.cluster.placement import Placement
from roll_opd.config.plan import MegatronPlan, RewardPlan, RolloutPlan, RunPlan, TeacherPlan
from roll_opd.rollout.scheduler import Scorers
from roll_opd.workers.learner import Learner
from roll_opd.workers.megatron import ScoreWorker, TrainWorker
from roll_opd.workers.reward import RewardWorker
from roll_opd.workers.roles import Judge, Sampler, Scorer, Student, Teacher
from roll_opd.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Cast:
    """Everyone who takes part in a run."""

    student: Student
    sampler: Sampler
    scorers: Scorers


async def assemble(plan: RunPlan, placement: Placement, judges: tuple[Judge, ...]) -> Cast:
    """Start every role but the judges, all at once, and wait until all are ready."""
    engine = {"seed": plan.seed, "deterministic": plan.deterministic}
    student = WorkerGroup(TrainWorker, plan.student, placement, _environment(plan))

    def frozen(worker: MegatronPlan) -> WorkerGroup:
        return WorkerGroup(ScoreWorker, worker, placement, _environment(plan))

    teachers = tuple(Teacher(t.worker.name, frozen(t.worker), _vocab_size(t.worker), t) for t in plan.teachers)
    reference = None
    if plan.reference:
        reference = Scorer(plan.reference.name, frozen(plan.reference), _vocab_size(plan.reference))
    sampler, *_ = await asyncio.gather(
        start_sampler(plan, plan.rollout, placement),
        student.setup(**engine),
        *[scorer.group.setup(**engine) for scorer in (*teachers, reference) if scorer],
    )
    return Cast(Student(plan.student, student), sampler, Scorers(teachers, judges, reference))


async def start_learner(plan: RunPlan, placement: Placement) -> tuple[Learner, Scorer | None]:
    """Start the student that learns from rows, and the reference policy where there is one."""
    engine = {"seed": plan.seed, "deterministic": plan.deterministic}
    student = WorkerGroup(TrainWorker, plan.student, placement, _environment(plan))
    reference = None
    if plan.reference:
        group = WorkerGroup(ScoreWorker, plan.reference, placement, _environment(plan))
        reference = Scorer(plan.reference.name, group, _vocab_size(plan.reference))
    await asyncio.gather(student.setup(**engine), *([reference.group.setup(**engine)] if reference else []))
    return Learner(plan.student, student), reference


async def start_sampler(plan: RunPlan, rollout: RolloutPlan, placement: Placement) -> Sampler:
    """Start the engines of `rollout`."""
    actors = []
    for engine in range(rollout.engines):
        devices = rollout.devices[engine * rollout.tp : (engine + 1) * rollout.tp]
        # the engine core is a process of its own and must not outlive a killed run
        env = {**_environment(plan), **rollout.env, "ROLL_OPD_DIE_WITH_PARENT": "1"}
        actors.append(RolloutWorker.options(**placement.options(devices, env)).remote())
    await asyncio.gather(*[actor.setup.remote(rollout, plan.seed, plan.deterministic) for actor in actors])
    return Sampler(actors)


@asynccontextmanager
async def teacher_as_sampler(plan: RunPlan, teacher: TeacherPlan, placement: Placement) -> AsyncIterator[Sampler]:
    """A teacher on the student's inference devices, to see how well it answers itself."""
    rollout = replace(plan.rollout, name=teacher.name, model=teacher.worker.model)
    sampler = await start_sampler(plan, rollout, placement)
    try:
        yield sampler
    finally:
        await sampler.close()


async def start_judges(plan: RunPlan) -> tuple[Judge, ...]:
    """Start the reward workers; they need no device."""
    judges = tuple(Judge(reward, _reward_workers(plan, reward)) for reward in plan.rewards)
    await asyncio.gather(
        *[worker.setup.remote(j.plan, plan.student.model.path) for j in judges for worker in j.workers]
    )
    return judges


def _reward_workers(plan: RunPlan, reward: RewardPlan) -> list:
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", **_environment(plan)}}}
    return [RewardWorker.options(**options).remote() for _ in range(reward.world_size)]


def _environment(plan: RunPlan) -> dict[str, str]:
    return {name: str(value) for name, value in plan.env.items()}


def _vocab_size(worker: MegatronPlan) -> int:
    return int(AutoConfig.from_pretrained(worker.model.path).vocab_size)
