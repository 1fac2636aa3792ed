"""An outage costs a pool time and no job; the processes are fakes in this process, and time is virtual."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from roll_opd.base.failures import RunError
from roll_opd.workers import outage
from roll_opd.workers.batched_calls import Answers
from roll_opd.workers.job_pool import JobPool, WorkerLost
from roll_opd.workers.outage import Problem

FAILS = "the service is down"
DOWN, NO = "", None  # answers: the service is down; the item is the cause


class VirtualTime(asyncio.SelectorEventLoop):
    """Event loop that skips to its next timer, so that a slow machine changes no order of events."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:
            self._now = min((timer.when() for timer in self._scheduled if not timer.cancelled()), default=self._now)
        super()._run_once()


class Service:
    """What all jobs need. `items` are the items that were sent while it was down or up."""

    def __init__(self, seed: int) -> None:
        self.random, self.is_up, self.sent = random.Random(seed), True, Counter[Any]()
        self.raises = False
        self.stores, self.stored = False, set[str]()  # whether the answers to repeated items are stored

    def __call__(self, _: int) -> "Service":
        return self

    async def setup(self) -> None: ...

    def kill(self) -> None: ...

    async def run(self, items: Sequence[str]) -> AsyncGenerator[Answers, None]:
        if self.raises:
            raise ValueError(FAILS)
        for place, item in enumerate(items):
            self.sent[item] += 1
            needs = self.random.randrange(3)  # turns before the service is asked, and after it
            for _ in range(needs):
                await asyncio.sleep(0)
            asks = item not in self.stored and not item.startswith("asks not")
            down = asks and (not self.is_up or item.startswith("overloads"))
            answer = DOWN if down else NO if item.startswith("broken") else item
            if self.stores and answer:
                self.stored.add(item)
            for _ in range(2 - needs):
                await asyncio.sleep(0)
            yield Answers([(place, answer)], hung=False)


def play(scene: Callable[[JobPool, Service], Awaitable[None]], seed: int = 0, **settings: Any) -> None:
    async def main() -> None:
        service = Service(seed)
        pool = JobPool(
            "the pool",
            service,
            lambda item, answer, seconds: answer or "failed",
            2,
            3,
            failure=lambda answer: None if answer else Problem("raised", FAILS, of_a_service=answer == DOWN),
            **settings,
        )
        await pool.start()
        async with asyncio.timeout(20):
            await scene(pool, service)
        await pool.end()
        assert len(asyncio.all_tasks()) == 1

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(main())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(outage, "LONGEST_PAUSE_S", 0.004)
    monkeypatch.setattr(outage, "DOUBT_S", 0.2)


def test_an_outage_costs_no_job_at_any_time_and_length(capfd: pytest.CaptureFixture[str]) -> None:
    """Jobs that fail at all times stay failures, also if controls are answered without the service."""
    for seed in range(45):
        chance = random.Random(seed)
        kinds = ("good", "good", "broken", *(("asks not", "asks not") if seed % 3 == 2 else ()))

        async def scene(pool: JobPool, service: Service, chance: Any = chance, kinds: Any = kinds) -> None:
            service.stores = len(kinds) == 3 and chance.random() < 0.5
            from_the_start = chance.random() < 0.2  # no job has succeeded before
            assert from_the_start or await pool.submit("first") == "first"
            items = [f"{chance.choice(kinds)} {number}" for number in range(40)]
            begins, seconds = chance.randrange(40), chance.choice((0.002, 0.02, 0.05))
            begins = 0 if from_the_start else begins
            jobs = []
            for number, item in enumerate(items):
                if number == begins:
                    service.is_up = False
                    asyncio.get_running_loop().call_later(seconds, setattr, service, "is_up", True)
                jobs.append(pool.submit(item))
                if chance.random() < 0.5:
                    await asyncio.sleep(0)
            assert await asyncio.gather(*jobs) == ["failed" if item[0] == "b" else item for item in items]
            assert sum(service.sent.values()) < 40 * 5  # nothing is sent while the pool knows of the outage

        play(scene, seed, independent=bool(seed % 2))
    assert "works again" in capfd.readouterr().err


def test_an_item_that_overloads_the_service_fails_after_a_while_and_its_kind_then_at_once() -> None:
    async def scene(pool: JobPool, service: Service) -> None:
        assert await pool.submit("good") == "good"
        first = pool.submit("overloads 1")
        assert await asyncio.gather(*[pool.submit(f"good {n}") for n in range(9)]) == [f"good {n}" for n in range(9)]
        assert not first.done()
        assert await first == "failed" and 0.2 < pool.drain_outage_seconds() < 2
        assert await pool.submit("overloads 2") == "failed" and pool.drain_outage_seconds() == 0
        service.is_up, again = False, pool.submit("good again")  # the control notices the outage
        asyncio.get_running_loop().call_later(0.02, setattr, service, "is_up", True)
        assert await again == "good again"

    play(scene)


def test_a_service_that_never_answered_ends_the_run_and_a_request_that_it_refuses_does_not() -> None:
    async def scene(pool: JobPool, service: Service) -> None:
        service.is_up = False
        jobs = [pool.submit(f"good {n}") for n in range(5)]
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(one, RunError) and FAILS in str(one) for one in found)

    async def refused(pool: JobPool, service: Service) -> None:
        service.is_up = False
        jobs = [pool.submit(f"broken {n}") for n in range(5)]
        await asyncio.sleep(0.01)
        service.is_up = True
        assert await asyncio.gather(*jobs) == ["failed"] * 5
        assert await pool.submit("good") == "good"

    play(scene)
    play(refused)


def test_many_jobs_that_fail_while_a_stored_control_succeeds_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(pool: JobPool, service: Service) -> None:
        service.stores = True
        assert await pool.submit("good") == "good"
        service.is_up = False
        jobs = [pool.submit(f"good {n}") for n in range(outage.MANY)]
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(one, RunError) and FAILS in str(one) for one in found)

    monkeypatch.setattr(outage, "DOUBT_S", 0.02)
    monkeypatch.setattr(outage, "LIMIT_S", 0.05)
    play(scene)


def test_jobs_that_fail_while_others_succeed_are_answered_without_an_outage(capfd: pytest.CaptureFixture[str]) -> None:
    async def scene(pool: JobPool, service: Service) -> None:
        assert await pool.submit("broken before any success") == "failed"  # there is no control yet
        assert await pool.submit("good") == "good"
        assert await asyncio.gather(*[pool.submit(f"broken {n}") for n in range(9)]) == ["failed"] * 9
        assert all(count <= 2 for item, count in service.sent.items() if item[0] == "b")
        assert pool.drain_outage_seconds() == 0

    play(scene)
    assert "down" not in capfd.readouterr().err


def test_a_long_outage_ends_the_run_and_unneeded_jobs_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(pool: JobPool, service: Service) -> None:
        assert await pool.submit("good") == "good"
        service.is_up = False
        jobs = [pool.submit(f"good {number}") for number in range(12)]
        await asyncio.sleep(0.01)
        later = pool.submit("later")
        for job in jobs:
            job.cancel()
        service.is_up = True
        assert await later == "later" and 0 < pool.drain_outage_seconds() < 1

    async def ended(pool: JobPool, service: Service) -> None:
        assert await pool.submit("good") == "good"
        service.is_up = False
        found = await asyncio.gather(*[pool.submit(f"good {n}") for n in range(12)], return_exceptions=True)
        found += await asyncio.gather(pool.submit("later"), return_exceptions=True)
        assert all(isinstance(one, RunError) and FAILS in str(one) for one in found)

    async def broken(pool: JobPool, service: Service) -> None:
        assert await pool.submit("good") == "good"
        service.is_up = False
        jobs = [pool.submit(f"good {n}") for n in range(4)]
        await asyncio.sleep(0.01)
        service.raises = True  # the repetitions of the held jobs find a process that does not answer
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(one, RunError) and FAILS in str(one) for one in found)

    play(cancelled)
    play(broken)
    monkeypatch.setattr(outage, "LIMIT_S", 0.05)
    play(ended)


class Dying(Service):
    """A worker that dies with each item `dies`, together with all items of its call."""

    async def run(self, items: Sequence[str]) -> AsyncGenerator[Answers, None]:
        await asyncio.sleep(0)
        if "dies" in items or (not self.is_up and "once" in items):
            self.is_up = True
            raise WorkerLost("worker_died", "died")
        yield Answers([(place, item) for place, item in enumerate(items)], hung=False)


def test_one_lost_process_costs_one_however_many_jobs_it_had() -> None:
    async def main(max_lost: int) -> int:
        worker = Dying(0)
        pool = JobPool("the pool", lambda _: worker, _kind, 1, 64, max_lost=max_lost)
        await pool.start()
        items = ["dies"] * 8 + ["good"] * 4
        answers = await asyncio.gather(*map(pool.submit, items))
        assert answers == ["worker_died"] * 8 + ["good"] * 4
        tolerated = 0
        while True:
            worker.is_up = False
            try:
                assert await pool.submit("once") == "once"
            except RunError:
                await pool.end()
                return tolerated
            tolerated += 1

    for max_lost in (2, 4):
        assert asyncio.run(main(max_lost)) == max_lost


def _kind(item: str, answer: Any, seconds: float) -> str:
    return answer.kind if isinstance(answer, WorkerLost) else answer
