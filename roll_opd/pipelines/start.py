"""Brings a plan's roles to life on the cluster."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from roll_opd.cluster.group import WorkerGroup
from roll_opd.cluster.placement import Placement
from roll_opd.config.plan import MegatronPlan, RewardPlan, RolloutPlan, RunPlan, TeacherPlan
from roll_opd.data.experience import Experience
from roll_opd.pipelines.checkpoints import CRITIC
from roll_opd.rollout.scheduler import FrozenModels
from roll_opd.workers.critic import Critic
from roll_opd.workers.learner import Learner
from roll_opd.workers.megatron import CriticWorker, LogprobWorker, TrainWorker
from roll_opd.workers.reward import RewardWorker
from roll_opd.workers.reward_pool import RewardPool
from roll_opd.workers.roles import FrozenModel, Sampler, Student, Teacher
from roll_opd.workers.rollout import RolloutWorker
from roll_opd.workers.supervised import SupervisedStudent


@dataclass(frozen=True)
class Cast:
    """Everyone who takes part in a run."""

    student: Student
    sampler: Sampler
    frozen_models: FrozenModels
    critic: Critic | None

    async def learn(
        self, plan: RunPlan, experiences: list[Experience], step: int
    ) -> tuple[list[Experience], dict[str, float]]:
        """Update the student and, beside it, the critic; in its first steps the critic alone.

        Returns what `Student.learn` does, with the critic's metrics.
        """
        student = (experiences, plan.teachers, plan.objective, plan.rollout.sampling.temperature, step - 1)
        if self.critic is None:
            return await self.student.learn(*student)
        if step <= self.critic.plan.warmup_steps:
            return experiences, await self.critic.learn(experiences)
        (learned, metrics), of_critic = await asyncio.gather(
            self.student.learn(*student), self.critic.learn(experiences)
        )
        return learned, metrics | of_critic

    async def save(self, directory: Path) -> None:
        """Write the state of everyone who learns."""
        await self.student.save(directory)
        if self.critic:
            await self.critic.save(directory / CRITIC)

    async def load(self, directory: Path) -> None:
        """Put back what `save` wrote."""
        await self.student.load(directory)
        if self.critic:
            await self.critic.load(directory / CRITIC)

    async def end(self) -> None:
        """End the processes of all but the reward_pools."""
        await self.sampler.end()
        for role in (self.student, self.critic, self.frozen_models.reference, *self.frozen_models.teachers):
            if role:
                role.group.end()


async def assemble(plan: RunPlan, placement: Placement) -> Cast:
    """Start every role but the reward_pools, all at once, and wait until all are ready for the plan's objective."""
    return await instruct(await start(plan, placement), plan)


async def start(plan: RunPlan, placement: Placement) -> Cast:
    """Start every role but the reward_pools, all at once, and wait until all are up."""
    student = Student(plan.student, WorkerGroup(TrainWorker, plan.student, placement, _environment(plan)))
    teachers = tuple(
        Teacher(t.worker.name, _frozen(plan, t.worker, placement), _vocab_size(t.worker), t) for t in plan.teachers
    )
    reference = _reference(plan, placement)
    critic = None
    if plan.critic:
        critic = Critic(plan.critic, WorkerGroup(CriticWorker, plan.critic, placement, _environment(plan)))
    sampler, *_ = await asyncio.gather(
        start_sampler(plan, plan.rollout, placement),
        *_setups(plan, student, *teachers, reference, critic),
    )
    return Cast(student, sampler, FrozenModels(teachers, reference=reference), critic)


async def instruct(cast: Cast, plan: RunPlan) -> Cast:
    """Give the roles what the plan's objective asks of them."""
    objective, student, frozen_models = plan.objective, cast.student, cast.frozen_models
    if objective.opd_objective == "full":
        for teacher in frozen_models.teachers:
            await student.load_teacher_head(teacher)
    if objective.opd_objective != "sampled":
        proposes = objective.opd_objective == "topk" and objective.opd_topk_source == "student"
        frozen_models = replace(frozen_models, targets_for=objective, student=student if proposes else None)
    return replace(cast, frozen_models=frozen_models)


async def start_supervised(plan: RunPlan, placement: Placement) -> tuple[SupervisedStudent, FrozenModel | None]:
    """Start the student that learns from rows, and the reference policy where there is one."""
    student = SupervisedStudent(plan.student, WorkerGroup(TrainWorker, plan.student, placement, _environment(plan)))
    reference = _reference(plan, placement)
    await asyncio.gather(*_setups(plan, student, reference))
    return student, reference


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
        await sampler.end()


async def start_reward_pools(plan: RunPlan, placement: Placement) -> tuple[RewardPool, ...]:
    """Start the reward workers, which need no device, and the engines of reward_pools that run here."""
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", **_environment(plan)}}}
    hire = RewardWorker.options(**options).remote

    async def begin(reward: RewardPlan) -> RewardPool:
        sampler = await start_sampler(plan, reward.engine, placement) if reward.engine else None
        pool = RewardPool(reward, hire, plan.student.model.path, sampler)
        await pool.start()
        return pool

    return tuple(await asyncio.gather(*[begin(reward) for reward in plan.rewards]))


def _frozen(plan: RunPlan, worker: MegatronPlan, placement: Placement) -> WorkerGroup:
    return WorkerGroup(LogprobWorker, worker, placement, _environment(plan))


def _reference(plan: RunPlan, placement: Placement) -> FrozenModel | None:
    if plan.reference is None:
        return None
    return FrozenModel(plan.reference.name, _frozen(plan, plan.reference, placement), _vocab_size(plan.reference))


def _setups(plan: RunPlan, *roles: Learner | FrozenModel | None) -> list[Coroutine[Any, Any, Any]]:
    return [role.group.setup(seed=plan.seed, deterministic=plan.deterministic) for role in roles if role]


def _environment(plan: RunPlan) -> dict[str, str]:
    return {name: str(value) for name, value in plan.env.items()}


def _vocab_size(worker: MegatronPlan) -> int:
    return int(AutoConfig.from_pretrained(worker.model.path).vocab_size)
