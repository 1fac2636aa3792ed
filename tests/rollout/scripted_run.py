"""A run of `pipelines.distill.train` whose parts outside of the driver are scripted.

The real ones are: the loop of the pipeline, the producer and its gate, rollouts with their scorer and rewards, the
sampler's sessions, validation, the weight sync through shared memory, and `Run`. Scripted are the actors behind them,
which wait for a turn before each answer. Losses and advantages are left out.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sampling_assets import RewardPool, Watcher, written
from scripted_loop import OUTSIDE, ScriptedLoop

from roll_opd.config.plan import SamplingPlan, TeacherPlan
from roll_opd.pipelines import distill, validation_runs
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.validation_runs import validate
from roll_opd.rollout.staleness import Pace
from roll_opd.rollout.workflow_runs import Batch, RolloutContext
from roll_opd.samples.sample import Sample
from roll_opd.samples.versions import concatenated
from roll_opd.teachers.scoring import Scorers
from roll_opd.teachers.teacher_interface import TeacherAnswer, Wanted
from roll_opd.tracking.console import Count, Progress
from roll_opd.tracking.phase_clock import PhaseClock
from roll_opd.weight_sync.send_weights import SharedMemorySync
from roll_opd.workers.actor_group import ActorGroup
from roll_opd.workers.reward_pool import RewardResult
from roll_opd.workers.sampler import Sampler

HELD_OUT, BUCKETS = 1, 2
SAMPLING = SamplingPlan(n=2, max_new_tokens=4)


@dataclass(frozen=True)
class Case:
    """What a run is: bounds, batches, filter, treatment of running answers, and where teachers score."""

    bound: int = 1
    depth: int | None = None
    groups: int = 1
    steps: int = 3
    filters: str = "none"  # or: some, all
    on_update: str = "continue"
    engines: int = 1
    in_rounds: bool = False
    scores_beside: bool = True  # teachers score during generation
    reads_rewards: bool = True
    eval_steps: int = 2
    is_reserved: bool = False  # a further engine is reserved for validation
    save_steps: int = 1

    @property
    def pace(self) -> Pace:
        return Pace.of(self.groups, self.bound, self.depth, is_strict=self.in_rounds)


@dataclass
class Engine:
    """One inference engine: what runs, what waits, and whether an update is in progress."""

    version: int = -1
    updating: bool = False
    running: int = 0


class Engines(ActorGroup):
    """The actors of the engines."""

    def __init__(self, loop: ScriptedLoop, case: Case) -> None:
        self._loop, self._mode = loop, case.on_update
        super().__init__([Engine() for _ in range(case.engines)])  # type: ignore[misc]
        self._changed = asyncio.Event()

    async def ask(self, number: int, method: str, bucket: Any = None, *, last: bool = False) -> Any:
        if method == "host":
            return "here"
        if method == "begin_update":
            return await self._begin(self.actors[number])
        assert method == "load_weights" and self.actors[number].updating
        await self._loop.turn()
        if last:
            self.actors[number].version = bucket["version"]
            self.actors[number].updating = False
            self._notify()

    async def stream(self, number: int, method: str, requests: Any, *_: Any) -> AsyncGenerator[list, None]:
        engine = self.actors[number]
        waiting = list(enumerate(requests._value))
        running: dict[int, tuple[Any, int]] = {}  # place -> (request, version at its start)
        try:
            while waiting or running:
                await self._loop.turn()
                if engine.updating and not (self._mode == "wait" and running):
                    await self._changed.wait()
                elif waiting and not engine.updating and (not running or self._loop.rng.random() < 0.7):
                    place, request = waiting.pop(self._loop.rng.randrange(len(waiting)))
                    running[place] = request, engine.version
                    engine.running += 1
                elif running:
                    place = self._loop.rng.choice(list(running))
                    request, version = running.pop(place)
                    engine.running -= 1
                    self._notify()
                    answer = written(request.seed)
                    tokens = len(answer.tokens)
                    versions = concatenated([((version, 1),), ((engine.version, tokens - 1),)])
                    yield [(place, replace(answer, versions=versions))]
        finally:
            engine.running -= len(running)
            self._notify()

    async def _begin(self, engine: Engine) -> None:
        assert not engine.updating
        await self._loop.turn()
        engine.updating = True
        while self._mode == "wait" and engine.running:
            await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Student:
    """The actors of the student, which also send weights, and its role."""

    together = ActorGroup.together

    def __init__(self, loop: ScriptedLoop) -> None:
        self._loop, self._left = loop, 0
        self.actors, self.plan, self.updates = [None, None], SimpleNamespace(name="student"), Count("updates")

    async def ask(self, rank: int, method: str, *_: Any, **__: Any) -> Any:
        await self._loop.turn()
        if method == "host":
            return "here"
        self._left = BUCKETS if method == "export_weights" and not rank else self._left
        self._left -= method in ("export_weights", "next_bucket") and not rank
        return {"size": 1}, not self._left

    async def compute_old_logprobs(self, samples: list[Sample], temperature: float) -> list[Sample]:
        await self._loop.turn()
        return samples

    async def learn(self, samples: list[Sample], *_: Any) -> tuple[list[Sample], dict[str, float]]:
        for _ in range(2):
            await self._loop.turn()
        return samples, {}


class ScriptedTeacher(Watcher):
    scorer = SimpleNamespace(drain_metrics=dict)

    def __init__(self, loop: ScriptedLoop) -> None:
        super().__init__(TeacherPlan("t", Watcher.worker, 1.0), [])
        self._loop = loop

    async def score(self, experiences: Sequence[Sample], temperature: float, wanted: Wanted) -> list[TeacherAnswer]:
        await self._loop.turn()
        return [TeacherAnswer(e.response_tokens.astype(np.float32)) for e in experiences]


class ScriptedRewards(RewardPool):
    def __init__(self, loop: ScriptedLoop) -> None:
        super().__init__()
        self._loop = loop

    def submit(self, experience: Sample) -> asyncio.Task[RewardResult]:
        return self._loop.create_task(self._rated(experience), name=OUTSIDE)

    async def _rated(self, experience: Sample) -> RewardResult:
        await self._loop.turn()
        return RewardResult("math", float(experience.response_tokens.sum() % 2))

    def drain_metrics(self) -> dict[str, float]:
        return {}


@dataclass
class Records:
    """The logger and the checkpoints of the run."""

    loop: ScriptedLoop
    case: Case
    clock: PhaseClock = field(default_factory=PhaseClock)
    progress: Progress = field(default_factory=Progress)
    startup_parts: dict[str, float] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    validated: list[int] = field(default_factory=list)
    kept_from: int | None = None  # first step whose row waits for its validation
    is_begun: bool = False

    def step(self, step: int, batch: Batch, samples: list[Sample], metrics: dict[str, float]) -> None:
        assert step == len(self.batches) + 1 == batch.version + 1 and len(batch.prompts) == self.case.groups
        assert all(sample.teacher_logprobs for sample in samples)
        assert all(sample.reward is not None for sample in samples)
        self.batches.append(batch)

    def start(self, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def engine_preflight(self, *_: Any) -> None: ...

    def model_files(self, step: int) -> dict[str, str]:
        return {}

    def hold(self) -> None:
        assert self.kept_from is None
        self.kept_from = len(self.batches) + 1

    def release(self, step: int, metrics: dict[str, float]) -> None:
        assert self.kept_from in (None, step)
        self.kept_from = None

    def due(self, step: int) -> bool:
        return step % self.case.save_steps == 0 or step == self.case.steps

    async def write(self, *_: Any) -> None:
        await self.loop.turn()

    def mark_logged(self, files: dict[str, str]) -> None:
        assert self.kept_from is None  # the logs are complete

    async def commit(self, *, wait: bool) -> None:
        await self.loop.turn()


def differ(group: list[Sample]) -> bool:
    return 0 < sum(sample.reward for sample in group) < len(group)


async def trained(loop: ScriptedLoop, case: Case, source: Any, patch: pytest.MonkeyPatch) -> Records:
    """Train with `distill.train`; return the records of the run."""
    records, student, engines = Records(loop, case), Student(loop), Engines(loop, case)
    sampler = Sampler(engines, SharedMemorySync(student, engines, "fp32"))  # type: ignore[arg-type]
    pools = (ScriptedRewards(loop),)
    measured = loop.create_future()
    measured.set_result(None)
    models = Scorers(teachers=[ScriptedTeacher(loop)])
    workers = RunWorkers(student, sampler, models, None, reward_pools=pools, teachers_measured=measured)  # type: ignore[arg-type]
    if case.is_reserved:
        reserved = Engines(loop, replace(case, engines=1))
        sync = SharedMemorySync(student, reserved, "fp32")  # type: ignore[arg-type]
        workers = replace(workers, validation_sampler=Sampler(reserved, sync))  # type: ignore[arg-type]
    rollout = SimpleNamespace(sampling=SAMPLING, engines=case.engines, engine_args={}, speculates=False)
    plan: Any = SimpleNamespace(
        async_generation_ratio=case.bound,
        async_depth=case.depth,
        max_steps=case.steps,
        rollout_batch_size=case.groups,
        extra_prompts=1 if case.bound == 0 and case.filters != "none" else 0,
        deterministic=case.in_rounds,
        engine_check=False,
        update_reads_rewards=case.reads_rewards,
        rewards_are_monitored=not case.reads_rewards,
        eval_steps=case.eval_steps,
        objective=SimpleNamespace(recompute_old_logprobs=True, engine_check=None),
        rollout=rollout,
        answers_per_prompt=SAMPLING.n,
        checkpoint=SimpleNamespace(async_save=False),
        student=SimpleNamespace(mini_batch_sequences=99),
        frozen_roles=list,
        **dict.fromkeys(("demonstrations", "critic", "workflow")),
        **dict.fromkeys(("seed", "min_batch_fraction"), 0),
        **dict.fromkeys(("teachers", "advantage_teachers"), ()),
    )
    starting = SimpleNamespace(parts={})
    ending: Any = SimpleNamespace(is_asked_for=False)
    held_out = source.peek(HELD_OUT)
    run = Run(plan, SimpleNamespace(starting=starting), source, held_out, records, records, None, None, ending)  # type: ignore[arg-type]

    def context_of(run: Run, pools: Any, sampler: Sampler, *_: Any, **__: Any) -> RolloutContext:
        return RolloutContext(sampler, SAMPLING, pools, 0, 4, PhaseClock(), is_eval=True)

    async def log_answers(run: Run, answers: Sequence[Sample], step: int, **_: Any) -> None:
        assert {version for answer in answers for version, _ in answer.versions} == {step}  # pure in its version
        records.validated.append(step)

    async def measure(run: Run, pools: Any, sampler: Sampler, step: int, **_: Any) -> dict[str, float]:
        _, answers = await validate(context_of(run, pools, sampler), run.held_out)
        await log_answers(run, answers, step)
        return {}

    async def without_workflow(*_: Any) -> None: ...

    async def without_check(*_: Any) -> None: ...

    filters = {"none": None, "some": differ, "all": lambda group: False}
    patch.setattr(validation_runs, "measure", measure)
    for name, value in {
        "context_of": context_of,
        "log_answers": log_answers,
        "start_workflow": without_workflow,
    }.items():
        patch.setattr(validation_runs, name, value)
    for name, value in {
        "start_workflow": without_workflow,
        "_preflight": lambda *_: SimpleNamespace(check=without_check),
        "first_kl_coef": lambda *_: 0.0,
        "with_advantages": lambda samples, plan, coef, *, rewarded: (samples, coef),
        "with_total_advantages": lambda samples, *_: samples,
        "sample_metrics": lambda *_: {},
        "chunk_samples": lambda _: 4,
        "reads_beside_generation": lambda *_: case.scores_beside,
        "_group_filter": lambda _: filters[case.filters],
        "gc": SimpleNamespace(collect=lambda: 0),
    }.items():
        patch.setattr(distill, name, value)
    await distill.train(run, workers)
    return records
