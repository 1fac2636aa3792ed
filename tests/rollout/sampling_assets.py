"""Engines, teachers and reward pools for rollout tests: each takes a random time, and answers do not depend on
timing."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.config.plan import (
    Layout,
    MegatronPlan,
    MicroBatchLimits,
    ModelPlan,
    RewardPlan,
    SamplingPlan,
    TeacherPlan,
)
from roll_opd.inference.vllm_requests import Completion
from roll_opd.rollout.workflow_runs import RolloutContext
from roll_opd.samples.sample import Sample
from roll_opd.teachers.scoring import Scorers
from roll_opd.teachers.teacher_interface import TeacherAnswer, Wanted
from roll_opd.tracking.phase_clock import PhaseClock
from roll_opd.workers.reward_pool import RewardResult
from roll_opd.workers.sampler import Request

SAMPLING = SamplingPlan(n=3, max_new_tokens=4)


class Engine:
    """Finishes requests in a random order; its answers depend only on the seed of the request."""

    def __init__(self, seed: int = 0, log: list[str] | None = None) -> None:
        self.rng, self.log = random.Random(seed), log if log is not None else []
        self.answered = 0

    def engine_of(self, group: int) -> int:
        return 0

    @asynccontextmanager
    async def session(self, chunk: int) -> AsyncIterator["Session"]:
        session = Session(self, chunk)
        writing = asyncio.create_task(session.write())
        try:
            yield session
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def answer(self, seed: int) -> Completion:
        return written(seed)


class Session:
    """Requests of one rollout; several sessions of an engine may be open."""

    def __init__(self, engine: Engine, chunk: int) -> None:
        self._engine, self._chunk = engine, chunk
        self._asked: list[tuple[Request, asyncio.Future[Completion]]] = []

    def ask(self, request: Request, sampling: SamplingPlan) -> "asyncio.Future[Completion]":
        self._asked.append((request, asyncio.get_running_loop().create_future()))
        return self._asked[-1][1]

    async def write(self) -> None:
        engine = self._engine
        while True:
            await asyncio.sleep(0)
            batch, self._asked = self._asked, []
            for count, (request, completion) in enumerate(engine.rng.sample(batch, len(batch))):
                for _ in range(1 + (count % self._chunk == 0) * engine.rng.randint(1, 4)):
                    await asyncio.sleep(0)
                engine.answered += 1
                completion.set_result(engine.answer(request.seed))
            if batch:
                engine.log.append("engine done")


def written(seed: int) -> Completion:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 5))
    tokens, logprobs = rng.integers(0, 50, length), -rng.random(length).astype(np.float32)
    return Completion(tokens=tokens, logprobs=logprobs, finish_reason="stop")


class Watcher:
    """A slow teacher that computes scores from the tokens of each sample."""

    name = "watcher"
    worker = MegatronPlan("watcher", ModelPlan("model"), (0,), Layout(), MicroBatchLimits())
    plan: Any

    def __init__(self, plan: Any, log: list[str], slowness: int = 1, fails: bool = False) -> None:
        self.plan, self._log, self._slowness, self._fails = plan, log, slowness, fails

    def scores(self, sample: Sample) -> bool:
        return self.plan.accepts(sample.tag)

    async def score(self, experiences: Sequence[Sample], temperature: float, wanted: Wanted) -> list[TeacherAnswer]:
        self._log.append(f"{self.plan} starts")
        for _ in range(self._slowness):
            await asyncio.sleep(0)
        if self._fails:
            raise RunError("no scores today")
        return [TeacherAnswer(e.response_tokens.astype(np.float32)) for e in experiences]


class RewardPool:
    """A reward domain whose workers take a random time for each sample."""

    plan = RewardPlan("math", ())

    def __init__(self, seed: int = 0) -> None:
        self._rng, self.asked = random.Random(seed), []

    def submit(self, experience: Sample) -> asyncio.Task[RewardResult]:
        self.asked.append(experience.id)
        return asyncio.create_task(self._score(experience, self._rng.randint(0, 9)))

    async def _score(self, experience: Sample, slowness: int) -> RewardResult:
        for _ in range(slowness):
            await asyncio.sleep(0)
        return RewardResult("math", float(experience.response_tokens.sum() % 2))


def scorers(log: list[str], slowness: int = 1, fails: bool = False) -> Scorers:
    return Scorers(teachers=[Watcher(TeacherPlan("t", Watcher.worker, 1.0), log, slowness, fails)])


def rollout_of(engine: Engine, watchers: Scorers, pool: RewardPool | None = None) -> RolloutContext:
    pools = [pool or RewardPool(seed=3)]
    return RolloutContext(engine, SAMPLING, pools, seed=7, chunk_samples=4, clock=PhaseClock(), scorers=watchers)
