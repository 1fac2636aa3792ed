"""Start the Ray workers of a plan as roles."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from roll_opd.base.user_modules import module_variables
from roll_opd.cluster.forkserver import forkserver_start
from roll_opd.cluster.forkserver.forkserver_main import ENGINES, MEGATRON
from roll_opd.cluster.placement import Placement
from roll_opd.cluster.startup_progress import StartupProgress
from roll_opd.config.plan import (
    AuxiliaryPlan,
    FollowingPlan,
    MegatronPlan,
    RewardPlan,
    RolloutPlan,
    RunPlan,
    TeacherPlan,
)
from roll_opd.data import templates
from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.inference.tool_calls import HERMES
from roll_opd.models.device_phases import PhaseMember, members_of
from roll_opd.models.model_info import read_model
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.teachers.megatron_teacher import Follower, MegatronScorer
from roll_opd.teachers.scoring import Scorers, Teacher
from roll_opd.teachers.teacher_registry import TeacherStart, scorer_of
from roll_opd.teachers.views import view_of
from roll_opd.weight_sync.choose_transport import choose_backend
from roll_opd.weight_sync.send_weights import make_weight_sync
from roll_opd.workers.actor_group import ActorGroup, WorkerGroup
from roll_opd.workers.colocation import DeviceScheduler
from roll_opd.workers.critic import Critic, CriticWorker
from roll_opd.workers.model_worker import FollowingWorker, LogprobWorker
from roll_opd.workers.process_replacement import Renewal
from roll_opd.workers.reward_pool import RewardPool, RewardWorker
from roll_opd.workers.sampler import RolloutWorker, Sampler
from roll_opd.workers.student import Student, TrainWorker
from roll_opd.workers.workflow_actor import WorkflowWorker
from roll_opd.workers.workflow_pool import WorkflowPool
from roll_opd.workflows.plugins import find_workflow
from roll_opd.workflows.workflow_checks import flag

MAX_RUNNING_REQUESTS = 256  # concurrent sequences of an engine without max_num_seqs
SMALL = 100_000_000  # maximum number of parameters of a model that a host may load twice


async def start_workers(plan: RunPlan, placement: Placement, answers: Path | None = None) -> RunWorkers:
    """Start all roles except rewards, concurrently. Return when all of them are ready for the objective of the plan.

    Args:
        answers: directory in which the run stores the answers of teacher servers.
    """
    turns, rollout = _turns(plan, placement), plan.rollout
    has_adapter = rollout is not None and rollout.adapter is not None  # which is small, and needs no connection
    over_gpus = placement.on_gpu and not has_adapter
    backend = choose_backend(plan.student.devices, _training_devices(plan), plan.weight_sync, on_gpu=over_gpus)
    # a transfer between GPUs connects all engines, but reserved engines get other versions
    backends = [backend] * plan.training_engines + [SHARED_MEMORY] * plan.validation_engines
    starting = [asyncio.ensure_future(start_sampler(plan, rollout, placement, backends, turns))] if rollout else []
    await asyncio.sleep(0)  # the student's engines start first, as they take longest
    student = Student(plan.student, _group(TrainWorker, plan, plan.student, placement, turns))
    own = {worker.name: _frozen(plan, worker, placement, turns) for worker in _served(plan)}
    groups = {**own, plan.student.name: student.group.without_adapter()}

    def scorer(role: MegatronPlan) -> MegatronScorer:
        return MegatronScorer(role.name, groups[plan.serving(role).name], read_model(Path(role.model.path)).vocab)

    scorers = [(one, scorer_of(TeacherStart(plan, one, scorer, answers))) for one in plan.teachers]
    teachers = tuple(Teacher(one, made, view_of(one, plan.student.model)) for one, made in scorers if made)
    reference = scorer(plan.reference) if plan.reference else None
    critic = None
    if plan.critic:
        critic = Critic(plan.critic, _group(CriticWorker, plan, plan.critic, placement, turns))
    learners = [role.group for role in (student, critic) if role]
    checks = check_teachers(plan, teachers, placement.starting)
    await asyncio.gather(*starting, checks, *_setups(plan, placement, turns, *learners, *own.values()))
    followers = [Follower(worker, own[worker.name]) for worker in _served(plan) if isinstance(worker, FollowingPlan)]
    workers = RunWorkers(student, Sampler(ActorGroup([])), Scorers(teachers, reference), critic, followers, turns)
    for worker in _served(plan):
        if not (isinstance(worker, FollowingPlan) or turns.takes_turns(worker.name)):
            own[worker.name].replace_lost(placement, **_setup_arguments(plan))
    if rollout:
        started = starting[0].result()
        parts = started.engines.split(plan.training_engines) if plan.validation_engines else (started.engines,)
        dtype, tp = rollout.model.dtype, rollout.tp
        sampler, *reserved = (
            replace(
                started,
                engines=one,
                sync=make_weight_sync(kind, student.group, one, dtype, tp, adapter=has_adapter),
                returned=asyncio.Event(),
            )
            for one, kind in zip(parts, (backend, SHARED_MEMORY), strict=False)
        )
        for each in (sampler, *reserved):
            for renewal in each.engines.renewals:
                renewal.done = each.returned.set
        workers = replace(workers, sampler=sampler, validation_sampler=reserved[0] if reserved else None)
    return await workers.for_objective(plan.objective)


def _training_devices(plan: RunPlan) -> Sequence[int]:
    """Return the devices of the engines that generate for training."""
    return plan.rollout.devices[: plan.training_engines * plan.rollout.tp] if plan.rollout else ()


async def start_sampler(
    plan: RunPlan,
    rollout: RolloutPlan,
    placement: Placement,
    backends: Sequence[str] = (),
    turns: DeviceScheduler | None = None,
) -> Sampler:
    """Start the engines of `rollout`.

    Args:
        backends: for each engine, the backend of weight updates (see `choose_backend`). Default: shared memory.
        turns: scheduler of the roles that share devices. The engines take turns with the other roles on their devices.
    """
    turns = turns or DeviceScheduler()
    actor_class: Any = RolloutWorker  # Ray's types do not know its `options`
    actors: list[Any] = []
    names: list[str] = []
    for engine in range(rollout.engines):
        devices = rollout.devices[engine * rollout.tp : (engine + 1) * rollout.tp]
        names.append(f"{rollout.name}, engine {engine} ({placement.where(devices[0])}),")
        # the engine core is a separate process that must end when a run is killed
        written = {**_environment(plan), **rollout.env}
        env = {**written, "ROLL_OPD_DIE_WITH_PARENT": "1", **forkserver_start.variables(ENGINES, written)}
        options = placement.options(devices, rollout.devices, env)
        actors.append(actor_class.options(max_restarts=-1, **options).remote())  # see `workers.process_replacement`
    engines = turns.join(rollout.name, ActorGroup(actors, names))
    kinds, sleeps = backends or [SHARED_MEMORY] * rollout.engines, turns.takes_turns(rollout.name)

    async def setup(engine: int) -> None:
        given = (rollout, plan.seed, plan.deterministic, kinds[engine])
        await engines.ask(engine, "setup", *given, sleeps=sleeps, awaits_weights=bool(backends))

    async def setup_all() -> None:
        async with turns.starting(rollout.name):
            await asyncio.gather(*map(setup, range(rollout.engines)))

    await placement.starting.of(f"{rollout.name} (vLLM)", setup_all())
    engines.set_up_again = setup_all
    if not sleeps:
        engines.renewals = tuple(
            Renewal(
                rollout.name,
                name.removesuffix(","),
                [handle],
                partial(setup, number),
                placement.losses,
                placement.starting,
            )
            for number, (handle, name) in enumerate(zip(actors, names, strict=True))
        )
    return Sampler(engines, survives_losses=not sleeps, repeats_batches=plan.deterministic)


@asynccontextmanager
async def teacher_as_student(
    plan: RunPlan, teacher: TeacherPlan, placement: Placement, requests: int
) -> AsyncIterator[tuple[Sampler, WorkflowPool | None]]:
    """Inside the block, run the engines of a teacher on the inference devices of the student, to validate the teacher.

    Yields (sampler, workflow): the engines of the teacher, and the workflow of the run with the teacher as its model.
    On CPUs, no more engines are started than the number of `requests` can occupy, because an engine takes longer to
    start than to answer.
    """
    assert plan.rollout is not None and teacher.model is not None
    engines = plan.rollout.engines
    if not (placement.on_gpu or plan.workflow):
        running = plan.rollout.engine_args.get("max_num_seqs") or MAX_RUNNING_REQUESTS
        engines = min(engines, -(-requests // running))
    rollout = replace(
        plan.rollout,
        name=teacher.name,
        model=teacher.model,
        adapter=None,
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
    """Start the reward workers and the engines of judges. Reward workers need no device."""
    spawn = _spawner(RewardWorker, plan, MEGATRON)

    async def begin(reward: RewardPlan) -> RewardPool:
        sampler = await start_sampler(plan, reward.engine, placement) if reward.engine else None
        pool = RewardPool(
            reward,
            spawn,
            plan.student.model.path,
            sampler,
            is_learned=not plan.rewards_are_monitored,
            max_lost=plan.max_lost_workers,
        )
        await placement.starting.of(f"rewards.{reward.domain}", pool.start())
        return pool

    return tuple(await asyncio.gather(*[begin(reward) for reward in plan.rewards]))


async def start_workflow(plan: RunPlan, sampler: Sampler, placement: Placement) -> WorkflowPool | None:
    """Start the processes of the run's workflow and its auxiliary models, if the run has a workflow."""
    if plan.workflow is None:
        return None

    async def engines(model: AuxiliaryPlan) -> Sampler | None:
        return await start_sampler(plan, model.engine, placement) if model.engine else None

    # one after another, because they may share devices
    auxiliaries = [await engines(model) for model in plan.workflow.auxiliary_models]
    assert plan.workflow.workflow and plan.rollout
    kind = MEGATRON if plan.workflow.tool_call_parser == HERMES else ENGINES  # vLLM has the other parsers
    # a process tokenises one text at a time
    spawn = _spawner(WorkflowWorker, plan, kind, TOKENIZERS_PARALLELISM="false")
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
        max_lost=plan.max_lost_workers,
    )
    await pool.start(sampler, auxiliaries)
    return pool


def _spawner(worker: Any, plan: RunPlan, kind: str, **more: str) -> Callable[..., Any]:
    """Return a function that starts a process of rewards or workflows, which needs no device.

    Args:
        worker: class of Ray actors.
        kind: what the process imports before it starts (see `forkserver_main`).
        more: further environment variables.
    """
    variables = {
        "OMP_NUM_THREADS": "1",
        **more,
        **_environment(plan),
        **templates.variables(),
        **forkserver_start.variables(kind, plan.env),
        **module_variables(),
    }
    return worker.options(num_cpus=0, runtime_env={"env_vars": variables}).remote


def chunk_samples(plan: RunPlan) -> int:
    """Return the number of finished samples that an inference engine sends together as a chunk.

    A chunk fills a micro-batch on every rank of the first teacher. A chunk has at most half of the samples that an
    engine generates in a step. The teacher can then score the first half while the engine generates the second half.
    Smaller chunks make a step slower if teacher and engine share a device, because all samples of a step finish at
    about the same time.
    """
    assert plan.rollout is not None
    half = -(-plan.sequences_per_step // (2 * plan.training_engines))
    role = next((teacher.role for teacher in plan.teachers if teacher.role), None)
    if role is None:
        return half
    limits = role.forward_limits
    by_tokens = limits.tokens // plan.rollout.max_model_len if limits.tokens else half
    return max(1, min(half, min(limits.sequences or by_tokens, by_tokens) * role.layout.dp))


def starts_beside_measurement(plan: RunPlan, placement: Placement) -> bool:
    """Return whether the roles may start while teachers are still being validated on separate engines.

    The engines of the teacher and of the run are then in memory together. This is allowed only on CPUs, only with small
    teachers, and only if the run need not be deterministic. It is not allowed in a run with a workflow, or if
    `kv_cache_memory_bytes` is configured.
    """
    assert plan.rollout is not None
    alone = plan.deterministic or placement.on_gpu or _members(plan, placement)
    twice = plan.workflow or "kv_cache_memory_bytes" in plan.rollout.engine_args
    parameters = [read_model(Path(t.model.path)).parameters for t in plan.teachers if t.model]
    return not alone and not twice and max(parameters, default=0) <= SMALL


def reads_beside_generation(plan: RunPlan, turns: DeviceScheduler) -> bool:
    """Return whether teachers and reference policy can score samples while other samples are being generated."""
    assert plan.rollout is not None
    readers = {plan.serving(role).name for role in plan.frozen_roles()}
    if plan.objective.opd_topk_source == "student" and plan.objective.opd_objective == "topk":
        readers.add(plan.student.name)
    if plan.async_generation_ratio:  # the student learns and its weights are sent to followers at the same time
        follows = any(isinstance(role, FollowingPlan) for role in plan.frozen_roles())
        return not (follows or plan.student.name in readers or any(map(turns.takes_turns, readers)))
    return not any(turns.share(reader, plan.rollout.name) for reader in readers)


def _turns(plan: RunPlan, placement: Placement) -> DeviceScheduler:
    return DeviceScheduler(_members(plan, placement))


def _members(plan: RunPlan, placement: Placement) -> Sequence[PhaseMember]:
    """Return the roles that take turns on shared devices.

    If states are not offloaded, which is the default without GPUs, there are no such roles.
    """
    taken = placement.on_gpu if plan.is_offload_states is None else plan.is_offload_states
    return members_of(plan) if taken else ()


def _group(
    actor: Any, plan: RunPlan, worker: MegatronPlan, placement: Placement, turns: DeviceScheduler
) -> WorkerGroup:
    return turns.join(worker.name, WorkerGroup(actor, worker, placement, _environment(plan)))


def _frozen(plan: RunPlan, worker: MegatronPlan, placement: Placement, turns: DeviceScheduler) -> WorkerGroup:
    actor = FollowingWorker if isinstance(worker, FollowingPlan) else LogprobWorker
    return _group(actor, plan, worker, placement, turns)


def _served(plan: RunPlan) -> list[MegatronPlan]:
    """Return the frozen roles that run in separate processes."""
    return [role for role in plan.frozen_roles() if plan.serving(role) is role]


def _setups(
    plan: RunPlan, placement: Placement, turns: DeviceScheduler, *groups: WorkerGroup
) -> list[Coroutine[Any, Any, Any]]:
    async def setup(group: WorkerGroup) -> None:
        async with turns.starting(group.plan.name):
            await group.setup(**_setup_arguments(plan))

    for group in groups:
        group.set_up_again = partial(setup, group)
    return [placement.starting.of(f"{group.plan.name} (Megatron)", setup(group)) for group in groups]


def _setup_arguments(plan: RunPlan) -> dict[str, Any]:
    return {"seed": plan.seed, "deterministic": plan.deterministic, "async_save": plan.checkpoint.async_save}


def _environment(plan: RunPlan) -> dict[str, str]:
    return {name: str(value) for name, value in plan.env.items()}


async def check_teachers(plan: RunPlan, teachers: Sequence[Teacher], starting: StartupProgress) -> None:
    """Check all teachers whose scorer has a method `check`, concurrently. Raises RunError for the first problem."""
    checks = [(one.plan, check) for one in teachers if (check := getattr(one.scorer, "check", None))]
    await asyncio.gather(
        *[starting.of(f"{teacher.name} ({teacher.source.location})", check(plan, teacher)) for teacher, check in checks]
    )
