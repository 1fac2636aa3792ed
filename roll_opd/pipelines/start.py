"""Starts the Ray workers of a plan and makes roles of them."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll_opd.actors.engine_actor import RolloutWorker
from roll_opd.actors.megatron_actor import CriticWorker, FollowingWorker, LogprobWorker, TrainWorker
from roll_opd.actors.reward_actor import RewardWorker
from roll_opd.actors.sampler import Sampler
from roll_opd.actors.workflow_actor import WorkflowWorker
from roll_opd.base.user_modules import module_variables
from roll_opd.cluster.forkserver import forkserver_start
from roll_opd.cluster.forkserver.forkserver_main import ENGINES, MEGATRON
from roll_opd.cluster.group import ActorGroup, FrozenGroup, WithoutAdapter, WorkerGroup
from roll_opd.cluster.placement import Placement
from roll_opd.cluster.rank_files import Writing
from roll_opd.config.plan import (
    AuxiliaryPlan,
    FollowingPlan,
    MegatronPlan,
    RewardPlan,
    RolloutPlan,
    RunPlan,
    TeacherPlan,
)
from roll_opd.data import run_date
from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.inference.tool_calls import HERMES
from roll_opd.models.device_phases import Member, Phase, members_of
from roll_opd.models.model_info import read_model
from roll_opd.pipelines.checkpoints import CRITIC, FOLLOWERS
from roll_opd.roles.colocation import Turns
from roll_opd.roles.critic_role import Critic
from roll_opd.roles.policy_roles import Follower, FrozenModel, FrozenModels, Student, Teacher
from roll_opd.roles.reward_pool import RewardPool
from roll_opd.roles.supervised_student import SupervisedStudent
from roll_opd.roles.workflow_pool import WorkflowPool
from roll_opd.samples.experience import Experience
from roll_opd.tracking.progress import Count
from roll_opd.weight_sync.transports import stream, sync_of, way_of
from roll_opd.workflows.interface import flag
from roll_opd.workflows.plugins import find_workflow

REQUESTS_OF_AN_ENGINE = 256  # that it answers at once, where its max_num_seqs says nothing else
SMALL = 100_000_000  # parameters of a model that may be on a host twice


@dataclass(frozen=True)
class RunWorkers:
    """The roles of a run that rolls out, except its rewards."""

    student: Student
    sampler: Sampler
    frozen_models: FrozenModels
    critic: Critic | None
    followers: Sequence[Follower] = ()
    turns: Turns = field(default_factory=Turns)  # of roles that share devices

    async def learn(
        self, plan: RunPlan, experiences: list[Experience], step: int, *, student_learns: bool = True
    ) -> tuple[list[Experience], dict[str, float]]:
        """Update the student and, beside it, the critic; return what `Student.learn` does, with the critic's metrics.

        Where `student_learns` is False, the critic learns alone.
        """
        if self.critic and not student_learns:
            await self.turns.enter(Phase.TRAIN)
            return experiences, await self.critic.learn(experiences)
        assert plan.rollout is not None
        temperature = plan.rollout.sampling.temperature
        await self.turns.enter(Phase.TRAIN)
        student = self.student.learn(experiences, plan.teachers, plan.objective, temperature, step)
        if self.critic is None:
            return await student
        if self.turns.share(self.student.plan.name, self.critic.plan.name):  # or each update would move both
            learned, metrics = await student
            return learned, metrics | await self.critic.learn(experiences)
        (learned, metrics), of_critic = await asyncio.gather(student, self.critic.learn(experiences))
        return learned, metrics | of_critic

    @property
    def updates(self) -> list[Count]:
        """Those of the step, of each role that learns."""
        return [learner.updates for learner in (self.student, self.critic) if learner]

    async def send_weights(self, version: int, *, has_learned: bool = True) -> None:
        """Give the student's weights to the inference engines, as `version`, and to teachers that follow it.

        `has_learned` False: these have them already, as a run begins.
        """
        await self.turns.enter(Phase.WEIGHT_SYNC)
        due = [follower for follower in self.followers if has_learned and follower.is_due(version)]
        assert self.sampler.sync
        await self.sampler.sync.push(version, [follower.group for follower in due])
        self.turns.engines_have_weights()
        await self._send_heads(due)

    async def begin_generation(self, version: int) -> None:
        """Have the engines there, with the student's weights of `version`, which they may have given up since."""
        if self.turns.lack_weights:
            await self.send_weights(version, has_learned=False)
        await self.turns.enter(Phase.GENERATE)

    async def save(self, directory: Path) -> Writing:
        """Write the state of student and critic, and the weights of teachers that follow the student."""
        await self.turns.enter(Phase.CHECKPOINT)
        parts = [await self.student.save(directory)]
        if self.critic:
            parts.append(await self.critic.save(directory / CRITIC))
        parts += [await follower.save(directory / FOLLOWERS) for follower in self.followers]
        return Writing([group for part in parts for group in part.groups])

    async def load(self, directory: Path) -> None:
        """Put back what `save` wrote."""
        await self.turns.enter(Phase.RESTORE)
        await self.student.load(directory)
        if self.critic:
            await self.critic.load(directory / CRITIC)
        for follower in self.followers:
            await follower.load(directory / FOLLOWERS)
        if live := [follower for follower in self.followers if follower.plan.is_live]:
            await self.turns.enter(Phase.WEIGHT_SYNC)
            dtype = self.student.plan.model.dtype
            await stream(self.student.group, [follower.group for follower in live], dtype, version=0)
        await self._send_heads(self.followers)

    async def _send_heads(self, followers: Sequence[Follower]) -> None:
        """Give the student the output heads of teachers that have changed, where it has such heads."""
        objective = self.frozen_models.targets_for
        if objective and objective.opd_objective == "full":
            for teacher in self.frozen_models.teachers:
                if teacher.group in [follower.group for follower in followers]:
                    await self.student.load_teacher_head(teacher)

    async def end(self) -> None:
        """End the processes."""
        await self.sampler.end()
        roles = (self.student, self.critic, self.frozen_models.reference, *self.frozen_models.teachers)
        for group in {role.group for role in roles if role}:
            group.end()


async def start_workers(plan: RunPlan, placement: Placement) -> RunWorkers:
    """Start every role but the rewards, all at once, and wait until all are up and ready for the plan's objective."""
    return await configure_objective(await start_unconfigured(plan, placement), plan)


async def start_unconfigured(plan: RunPlan, placement: Placement) -> RunWorkers:
    """Start every role but the rewards, all at once, and wait until all are up."""
    assert plan.rollout is not None
    rollout, turns = plan.rollout, _turns(plan, placement)
    over_gpus = placement.on_gpu and plan.weight_sync == "auto"
    way = way_of(plan.student.devices, rollout.devices, on_gpu=over_gpus)
    sampler = asyncio.ensure_future(start_sampler(plan, rollout, placement, way, turns))
    await asyncio.sleep(0)  # its engines start first: they take longest
    student = Student(plan.student, _group(TrainWorker, plan, plan.student, placement, turns))
    own = {worker.name: _frozen(plan, worker, placement, turns) for worker in _served(plan)}
    groups: dict[str, FrozenGroup] = {**own, plan.student.name: WithoutAdapter(student.group)}
    teachers = tuple(
        Teacher(t.worker.name, groups[plan.serving(t.worker).name], _vocab_size(t.worker), t) for t in plan.teachers
    )
    reference = None
    if plan.reference:
        group = groups[plan.serving(plan.reference).name]
        reference = FrozenModel(plan.reference.name, group, _vocab_size(plan.reference))
    critic = None
    if plan.critic:
        critic = Critic(plan.critic, _group(CriticWorker, plan, plan.critic, placement, turns))
    learners = [role.group for role in (student, critic) if role]
    await asyncio.gather(sampler, *_setups(plan, placement, *learners, *own.values()))
    followers = [Follower(worker, own[worker.name]) for worker in _served(plan) if isinstance(worker, FollowingPlan)]
    engines = sampler.result().engines
    synced = Sampler(engines, sync_of(way, student.group, engines, rollout.model.dtype, rollout.tp))
    return RunWorkers(student, synced, FrozenModels(teachers, reference=reference), critic, followers, turns)


async def configure_objective(workers: RunWorkers, plan: RunPlan) -> RunWorkers:
    """Give the roles what the plan's objective needs of them beyond sampled log-probs."""
    objective, student, frozen_models = plan.objective, workers.student, workers.frozen_models
    if objective.opd_objective == "full":
        for teacher in frozen_models.teachers:
            await student.load_teacher_head(teacher)
    if objective.opd_objective != "sampled":
        proposes = objective.opd_objective == "topk" and objective.opd_topk_source == "student"
        frozen_models = replace(frozen_models, targets_for=objective, student=student if proposes else None)
    return replace(workers, frozen_models=frozen_models)


async def start_supervised(plan: RunPlan, placement: Placement) -> tuple[SupervisedStudent, FrozenModel | None]:
    """Start the student that learns from rows, and the reference policy where there is one."""
    turns = _turns(plan, placement)
    student = SupervisedStudent(plan.student, _group(TrainWorker, plan, plan.student, placement, turns), turns)
    reference = None
    own = [_frozen(plan, worker, placement, turns) for worker in _served(plan)]
    if plan.reference:
        group = own[0] if own else WithoutAdapter(student.group)
        reference = FrozenModel(plan.reference.name, group, _vocab_size(plan.reference))
    await asyncio.gather(*_setups(plan, placement, student.group, *own))
    return student, reference


async def start_sampler(
    plan: RunPlan,
    rollout: RolloutPlan,
    placement: Placement,
    weight_transfer: str = SHARED_MEMORY,
    turns: Turns | None = None,
) -> Sampler:
    """Start the engines of `rollout`, which may be a member of `turns`; weights reach them by `weight_transfer`."""
    turns = turns or Turns()
    actor_class: Any = RolloutWorker  # Ray's types do not know its `options`
    actors: list[Any] = []
    names: list[str] = []
    for engine in range(rollout.engines):
        devices = rollout.devices[engine * rollout.tp : (engine + 1) * rollout.tp]
        names.append(f"{rollout.name}, engine {engine} ({placement.where(devices[0])}),")
        # the engine core is a process of its own and must not outlive a killed run
        written = {**_environment(plan), **rollout.env}
        env = {**written, "ROLL_OPD_DIE_WITH_PARENT": "1", **forkserver_start.variables(ENGINES, written)}
        actors.append(actor_class.options(**placement.options(devices, rollout.devices, env)).remote())
    engines = ActorGroup(actors, names)
    in_turn = turns.join(rollout.name, engines)

    async def setup() -> None:
        async with turns.starting(rollout.name):
            sleeps = in_turn is not engines
            await engines.call("setup", rollout, plan.seed, plan.deterministic, weight_transfer, sleeps=sleeps)

    await placement.starting.of(f"{rollout.name} (vLLM)", setup())
    return Sampler(in_turn)


@asynccontextmanager
async def teacher_as_student(
    plan: RunPlan, teacher: TeacherPlan, placement: Placement, requests: int
) -> AsyncIterator[tuple[Sampler, WorkflowPool | None]]:
    """Have a teacher in the student's place inside the block, to see how well it does itself.

    Yields its engines, on the student's inference devices, and the run's workflow with it as the model. On CPUs, where
    an engine's start costs more than the answers do, there are no more engines than `requests` occupy.
    """
    assert plan.rollout is not None
    engines = plan.rollout.engines
    if not (placement.on_gpu or plan.workflow):
        at_once = plan.rollout.engine_args.get("max_num_seqs") or REQUESTS_OF_AN_ENGINE
        engines = min(engines, -(-requests // at_once))
    rollout = replace(
        plan.rollout,
        name=teacher.name,
        model=teacher.worker.model,
        devices=plan.rollout.devices[: engines * plan.rollout.tp],
        engines=engines,
    )
    swapped = replace(plan, rollout=rollout)
    sampler = await start_sampler(swapped, rollout, placement)
    workflow = None
    try:
        workflow = await start_workflow(swapped, sampler, placement)
        yield sampler, workflow
    finally:
        if workflow:
            await workflow.end()
        await sampler.end()


async def start_reward_pools(plan: RunPlan, placement: Placement) -> tuple[RewardPool, ...]:
    """Start the reward workers, which need no device, and the engines of language models that judge here."""
    variables = {
        "OMP_NUM_THREADS": "1",
        **_environment(plan),
        **run_date.variables(),
        **forkserver_start.variables(MEGATRON, plan.env),
        **module_variables(),
    }
    options = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
    actor_class: Any = RewardWorker
    spawn = actor_class.options(**options).remote

    async def begin(reward: RewardPlan) -> RewardPool:
        sampler = await start_sampler(plan, reward.engine, placement) if reward.engine else None
        pool = RewardPool(reward, spawn, plan.student.model.path, sampler, is_learned=not plan.rewards_are_monitored)
        await placement.starting.of(f"rewards.{reward.domain}", pool.start())
        return pool

    return tuple(await asyncio.gather(*[begin(reward) for reward in plan.rewards]))


async def start_workflow(plan: RunPlan, sampler: Sampler, placement: Placement) -> WorkflowPool | None:
    """Start the processes of the run's workflow, where it has one, and the models that it asks beside the student."""
    if plan.workflow is None:
        return None

    async def engines(model: AuxiliaryPlan) -> Sampler | None:
        return await start_sampler(plan, model.engine, placement) if model.engine else None

    auxiliaries = [await engines(model) for model in plan.workflow.auxiliary_models]  # they may share devices
    assert plan.workflow.workflow and plan.rollout
    alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # one text at a time has no use for threads
    kind = MEGATRON if plan.workflow.tool_call_parser == HERMES else ENGINES  # the other parsers are vLLM's
    variables = {
        **alone,
        **_environment(plan),
        **run_date.variables(),
        **forkserver_start.variables(kind, plan.env),
        **module_variables(),
    }
    actor_class: Any = WorkflowWorker
    spawn = actor_class.options(num_cpus=0, runtime_env={"env_vars": variables}).remote
    repeats = flag(find_workflow(plan.workflow.workflow, plan.workflow.plugin_dir), "can_repeat")
    pool = WorkflowPool(
        plan.workflow,
        spawn,
        plan.rollout,
        plan.teachers,
        plan.seed,
        repeats=repeats,
        chunk=chunk_samples(plan),
        deterministic=plan.deterministic,
    )
    await pool.start(sampler, auxiliaries)
    return pool


def chunk_samples(plan: RunPlan) -> int:
    """Return how many finished samples an inference engine hands over together.

    Enough to fill a micro-batch on every rank of the first teacher, but at most half of an engine's share of the step,
    so that log-probs are computed while the other half is still being generated. Smaller chunks cost more where teacher
    and engine share a device: the samples of a step end close together.
    """
    assert plan.rollout is not None
    half = -(-plan.sequences_per_step // (2 * plan.rollout.engines))
    if not plan.teachers:
        return half
    worker = plan.teachers[0].worker
    limits = worker.forward_limits
    by_tokens = limits.tokens // plan.rollout.max_model_len if limits.tokens else half
    return max(1, min(half, min(limits.sequences or by_tokens, by_tokens) * worker.layout.dp))


def starts_beside_measurement(plan: RunPlan, placement: Placement) -> bool:
    """Whether the roles may start while other engines show how well the teachers do.

    On CPUs, where these are small: what measures them would be there twice. In deterministic runs all has its order.
    """
    assert plan.rollout is not None
    alone = plan.deterministic or placement.on_gpu or _members(plan, placement)
    twice = plan.workflow or "kv_cache_memory_bytes" in plan.rollout.engine_args
    parameters = [read_model(Path(teacher.worker.model.path)).parameters for teacher in plan.teachers]
    return not alone and not twice and max(parameters, default=0) <= SMALL


def reads_beside_generation(plan: RunPlan, turns: Turns) -> bool:
    """Whether teachers and reference policy can read samples while others are still being written."""
    assert plan.rollout is not None
    workers = [*(teacher.worker for teacher in plan.teachers), *([plan.reference] if plan.reference else [])]
    readers = {plan.serving(worker).name for worker in workers}
    if plan.objective.opd_topk_source == "student" and plan.objective.opd_objective == "topk":
        readers.add(plan.student.name)
    return not any(turns.share(reader, plan.rollout.name) for reader in readers)


def _turns(plan: RunPlan, placement: Placement) -> Turns:
    return Turns(_members(plan, placement))


def _members(plan: RunPlan, placement: Placement) -> Sequence[Member]:
    """Return the roles that take turns: on GPUs, and elsewhere where that is written."""
    taken = placement.on_gpu if plan.is_offload_states is None else plan.is_offload_states
    return members_of(plan) if taken else ()


def _group(actor: Any, plan: RunPlan, worker: MegatronPlan, placement: Placement, turns: Turns) -> Any:
    return turns.join(worker.name, WorkerGroup(actor, worker, placement, _environment(plan)))


def _frozen(plan: RunPlan, worker: MegatronPlan, placement: Placement, turns: Turns) -> Any:
    actor = FollowingWorker if isinstance(worker, FollowingPlan) else LogprobWorker
    return _group(actor, plan, worker, placement, turns)


def _served(plan: RunPlan) -> list[MegatronPlan]:
    """Return the frozen roles that have processes of their own."""
    workers = [*(teacher.worker for teacher in plan.teachers), *([plan.reference] if plan.reference else [])]
    return [worker for worker in workers if plan.serving(worker) is worker]


def _setups(plan: RunPlan, placement: Placement, *groups: WorkerGroup) -> list[Coroutine[Any, Any, Any]]:
    arguments = {"seed": plan.seed, "deterministic": plan.deterministic, "async_save": plan.checkpoint.async_save}
    return [placement.starting.of(f"{group.plan.name} (Megatron)", group.setup(**arguments)) for group in groups]


def _environment(plan: RunPlan) -> dict[str, str]:
    return {name: str(value) for name, value in plan.env.items()}


def _vocab_size(worker: MegatronPlan) -> int:
    return read_model(Path(worker.model.path)).vocab
