"""Validation during training: the learner goes on, rows stay complete and in order, and answers are of one version."""

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sampling_assets import SAMPLING, Engine, RewardPool, written

from roll_opd.base.failures import RunError
from roll_opd.inference.vllm_requests import Completion
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.validation_runs import SECONDS, ConcurrentValidation
from roll_opd.rollout.workflow_protocol import SingleTurn
from roll_opd.teachers.scoring import Scorers
from roll_opd.tracking.metrics_writer import MetricsWriter
from roll_opd.tracking.phase_clock import PhaseClock
from roll_opd.tracking.run_directory import METRICS, RunDirectory, read_jsonl
from roll_opd.tracking.summary import ACCURACY

STEPS, EVERY, PROMPTS = 6, 2, 5


class ReservedEngine(Engine):
    """Answers when `opened` is set, and labels each token with the version of its weights at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.version, self.opened = 0, asyncio.Event()

    async def served(self, work: Awaitable[Any]) -> Any:
        return await work

    def answer(self, seed: int) -> Completion:
        completion = written(seed)
        return replace(completion, versions=((self.version, len(completion.tokens)),))


class Waiting(SingleTurn):
    def __init__(self, engine: ReservedEngine) -> None:
        self.engine = engine

    async def run(self, task: Any, model: Any) -> Any:
        await self.engine.opened.wait()
        return await super().run(task, model)


class Loop:
    """A training loop around the real schedule, trackers and rollout; a step is one turn of the event loop."""

    def __init__(self, place: Path, make_source: Any, saves: tuple[int, ...] = ()) -> None:
        self.directory, self.engine, self.saves = RunDirectory.create(place, "exp"), ReservedEngine(), {*saves, STEPS}
        trackers = MetricsWriter.open((), self.directory)
        logger = SimpleNamespace(
            hold=trackers.hold,
            release=lambda _, metrics: trackers.release(metrics),
            log=trackers.log,
            answers=self.note,
        )
        plan = SimpleNamespace(
            validation=SimpleNamespace(sampling=SAMPLING),
            rollout=SimpleNamespace(sampling=SAMPLING, max_model_len=64),
            eval_steps=EVERY,
            max_steps=STEPS,
            seed=7,
            sequences_per_step=8,
            training_engines=1,
            teachers=(),
            logged_samples_per_step=2,
            workflow=None,
        )
        self.run = SimpleNamespace(
            plan=plan,
            held_out=make_source().peek(PROMPTS),
            logger=logger,
            clock=PhaseClock(),
            progress=None,
            placement=None,
            saves=lambda step: step in self.saves,
        )
        self.run.validates = lambda step: Run.validates(self.run, step)
        self.shown: list[tuple[int, list[Any]]] = []
        workers = SimpleNamespace(
            validation_sampler=self.engine,
            reward_pools=[RewardPool()],
            scorers=Scorers(),
            turns=None,
            send_for_validation=self.send,
        )
        self.validation = ConcurrentValidation(self.run, workers)

    def note(self, step: int, by: str, answers: list[Any]) -> None:
        self.shown.append((step, answers))

    async def send(self, version: int) -> None:
        self.engine.version = version

    async def step(self, step: int) -> None:
        metrics = await self.validation.after(step)
        self.run.logger.log(step, {"loss": float(step), **metrics})
        await asyncio.sleep(0)

    @property
    def rows(self) -> list[dict]:
        return read_jsonl(self.directory.path / METRICS)


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation runs wait for the engine to be opened."""
    from roll_opd.pipelines import validation_runs

    real = validation_runs.context_of

    def context_of(run: Any, pools: Any, engine: Any, workflow: Any, **more: Any) -> Any:
        return real(run, pools, engine, Waiting(engine), **more)

    monkeypatch.setattr(validation_runs, "context_of", context_of)


def complete(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(limited())


def test_steps_continue_and_their_rows_follow_the_validation(tmp_path: Path, make_source: Any) -> None:
    async def work() -> None:
        loop = Loop(tmp_path, make_source)
        for step in (1, 2, 3):
            await loop.step(step)
        assert [row["step"] for row in loop.rows] == [1]  # the weights of step 2 are still being validated
        due = asyncio.create_task(loop.step(4))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not due.done()  # the next validation waits for this one
        loop.engine.opened.set()
        await due
        for step in (5, 6):
            await loop.step(step)
        assert [row["step"] for row in loop.rows] == list(range(1, STEPS + 1))
        assert [row["step"] for row in loop.rows if ACCURACY in row and row[SECONDS] > 0] == [2, 4, 6]
        assert [(step, {v for one in shown for v, _ in one.versions}) for step, shown in loop.shown] == [
            (step, {step}) for step in (2, 4, 6)
        ]

    complete(work())


@pytest.mark.parametrize("saved", [2, 3])
def test_a_checkpoint_waits_for_the_validation(tmp_path: Path, make_source: Any, saved: int) -> None:
    """So every row up to the checkpoint has its metrics in the logs."""

    async def work() -> None:
        loop = Loop(tmp_path, make_source, saves=(saved,))
        for step in range(1, saved):
            await loop.step(step)
        due = asyncio.create_task(loop.step(saved))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not due.done()
        loop.engine.opened.set()
        await due
        assert [row["step"] for row in loop.rows] == list(range(1, saved + 1)) and ACCURACY in loop.rows[1]

    complete(work())


def test_an_answer_of_another_version_is_an_error(tmp_path: Path, make_source: Any) -> None:
    async def work() -> None:
        loop = Loop(tmp_path, make_source)
        for step in (1, 2):
            await loop.step(step)
        await loop.send(3)
        loop.engine.opened.set()
        with pytest.raises(RunError, match="tokens of weights of version 3, but version 2 is validated"):
            await loop.validation.end()
        await loop.validation.aclose()
        assert [row["step"] for row in loop.rows] == [1, 2]

    complete(work())


def test_a_run_that_ends_early_keeps_its_rows_and_aborts_the_requests(tmp_path: Path, make_source: Any) -> None:
    async def work() -> None:
        loop = Loop(tmp_path, make_source)
        for step in (1, 2, 3):
            await loop.step(step)
        await loop.validation.aclose()
        assert [row["step"] for row in loop.rows] == [1, 2, 3] and not any(ACCURACY in row for row in loop.rows)
        assert len(asyncio.all_tasks()) == 1 and loop.engine.answered == 0

    complete(work())


def test_an_error_of_a_validation_ends_the_run_at_the_next_step(tmp_path: Path, make_source: Any) -> None:
    async def work() -> None:
        loop = Loop(tmp_path, make_source)
        loop.run.held_out = [None]  # no prompt
        loop.engine.opened.set()
        for step in (1, 2):
            await loop.step(step)
        for _ in range(20):
            await asyncio.sleep(0)
        with pytest.raises(AttributeError):
            await loop.step(3)
        await loop.validation.aclose()
        assert [row["step"] for row in loop.rows] == [1, 2]

    complete(work())
