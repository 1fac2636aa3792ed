"""Updates of two replicas with tensor parallelism while 64 requests run: tokens, versions, and the pause.

`UPDATES=500` in the environment runs 500 updates; the nightly test makes 100.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from emitting_model import Emitting, spans

from roll_opd.config.plan import SamplingPlan

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

UPDATES = int(os.environ.get("UPDATES", "100"))
ROUNDS, IDLE = 10, 3  # rounds of the measurement; updates without requests in a round
RUNNING, LIMITS = 64, (8, 80)  # requests of each replica; tokens of an answer


class Replica:
    """An engine with 64 requests, each of which is replaced when it ends."""

    def __init__(self, emitting: Emitting) -> None:
        self.emitting = emitting
        self.rng = np.random.default_rng(0)
        self.left, self.running, self.fewest = True, 0, RUNNING
        self.tokens = self.split = 0

    async def requests(self) -> None:
        engine = self.emitting.engine
        while self.left:
            limit, seed = int(self.rng.integers(*LIMITS)), int(self.rng.integers(10**6))
            prompt = self.rng.integers(2, 200, 1 + limit).tolist()
            self.running += 1
            answer = await engine.generate(prompt, SamplingPlan(max_new_tokens=limit), seed)
            self.running -= 1
            assert len(answer.tokens) == limit and answer.finish_reason == "length"
            assert answer.versions == spans(answer.tokens.tolist())
            assert np.isfinite(answer.logprobs).all()
            self.tokens += limit
            self.split += len(answer.versions) > 1


@pytest.fixture
def replicas(tmp_path: Path, warm: None) -> Iterator[list[Replica]]:
    runner = asyncio.Runner()
    first, second = (
        Emitting(tmp_path / name, runner=runner, on_update="continue", tensor_parallel_size=2) for name in "01"
    )
    yield [Replica(first), Replica(second)]
    for engine in (first, second):
        engine.run(engine.engine.close())
    runner.close()


async def step_seconds(replica: Replica) -> float:
    """Return the seconds of a decoding step of 64 requests."""
    engine, times = replica.emitting.engine, {}
    for limit in (8, 72):
        prompts, sampling = [[5, 6]] * RUNNING, SamplingPlan(max_new_tokens=limit)
        began = time.perf_counter()
        assert len([c async for c in engine.generate_batch(prompts, sampling, range(RUNNING))]) == RUNNING
        times[limit] = time.perf_counter() - began
    return (times[72] - times[8]) / 64


async def steps_together(replicas: list[Replica]) -> list[float]:
    """Return the seconds of a step of each replica while all replicas run, as they do before an update."""
    return await asyncio.gather(*[step_seconds(replica) for replica in replicas])


async def timed(replicas: list[Replica]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*[replica.emitting.update() for replica in replicas])
    return time.perf_counter() - began


async def updated(replicas: list[Replica], updates: int, rng: np.random.Generator) -> list[float]:
    """Return the seconds of each update; all requests run meanwhile."""
    seconds = []
    async with asyncio.TaskGroup() as tasks:
        for replica in replicas:
            replica.left = True
            for _ in range(RUNNING):
                tasks.create_task(replica.requests())
        for _ in range(updates):
            await asyncio.sleep(0.1 * rng.random())
            assert all(replica.running == RUNNING for replica in replicas)
            seconds.append(await asyncio.wait_for(timed(replicas), 120))
        for replica in replicas:
            replica.left = False
    return seconds


def test_updates_under_load_lose_and_repeat_no_token(replicas: list[Replica]) -> None:
    """The pause is at most two forward steps and the time of the same update without requests.

    The three times are measured in turns, because the speed of a shared machine changes.
    """
    run, rng = replicas[0].emitting.run, np.random.default_rng(1)
    steps, copies, pauses = [], [], []
    for _ in range(ROUNDS):
        steps.append(max(run(steps_together(replicas))))
        copies += [run(timed(replicas)) for _ in range(IDLE)]
        pauses += run(updated(replicas, UPDATES // ROUNDS, rng))
    for replica in replicas:
        assert replica.emitting.engine.updates.version == len(copies) + len(pauses)
        assert replica.tokens > 10 * UPDATES and replica.split > UPDATES / 10
    step, copy, pause = (median(seconds) for seconds in (steps, copies, pauses))
    ratio = pause / (2 * step + copy)
    print(
        f"{UPDATES} updates of 2 replicas with TP 2,"
        f" {sum(r.tokens for r in replicas)} tokens; medians: pause"
        f" {1e3 * pause:.1f} ms, forward step {1e3 * step:.1f} ms, update without requests"
        f" {1e3 * copy:.1f} ms, pause / (2 steps + update) {ratio:.2f}"
    )
    assert ratio < 1
