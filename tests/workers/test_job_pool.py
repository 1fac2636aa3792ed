"""Each job of a pool gets one answer, despite failing processes; here the processes are fakes in this process."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest
import ray

from roll_opd.base.failures import RunError
from roll_opd.workers.batched_calls import Answers
from roll_opd.workers.job_pool import MAX_INITIAL_FAILURES, FailureLog, JobPool, WorkerLost, in_equal_shares
from roll_opd.workers.ray_worker import RayWorker, next_answer

DIE, HANG, RAISE, WAIT, FORGET = "die", "hang", "raise", "wait", "forget"


class Process:
    """A worker in this process. An item is (number, event); the answer is twice the number."""

    def __init__(self, place: int, processes: "Processes") -> None:
        self.place, self.processes = place, processes
        self.has: list[int] = []
        self.had: list[int] = []
        self.is_dead = False

    async def setup(self) -> None:
        await asyncio.sleep(0)
        if self.processes.deaths_at_start:
            self.processes.deaths_at_start -= 1
            self.is_dead = True
            raise WorkerLost("worker_died", "the node is full")

    async def run(self, items: Sequence[tuple[int, str]]) -> AsyncGenerator[Answers, None]:
        numbers = [number for number, _ in items]
        self.has += numbers
        self.had += numbers
        self.processes.most = max(self.processes.most, len(self.has))
        try:
            for place, (number, what) in enumerate(items):
                for _ in range(self.processes.random.randrange(4)):
                    await asyncio.sleep(0)
                event = {WAIT: self.processes.gate, DIE: self.processes.fuse}.get(what)
                while event and not event.is_set() and not self.is_dead:
                    await asyncio.sleep(0)
                if what == DIE and not self.is_dead:
                    self.is_dead = True
                    self.processes.last_moments.append(list(self.has))
                if self.is_dead:
                    raise WorkerLost("worker_died", "died")
                if what == RAISE:
                    raise KeyError("a bug")
                if what == FORGET:
                    return
                self.has.remove(number)
                numbers.remove(number)
                yield Answers([(place, 2 * number)], hung=what == HANG)
        finally:
            for number in numbers:
                self.has.remove(number)

    def kill(self) -> None:
        self.is_dead = True
        self.processes.killed.append(self)


class Processes:
    """All processes that a pool has started."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.gate, self.fuse = asyncio.Event(), asyncio.Event()  # of items that wait, and of those that die
        self.fuse.set()
        self.started: list[Process] = []
        self.killed: list[Process] = []
        self.last_moments: list[list[int]] = []  # jobs in a process at its death
        self.deaths_at_start = 0
        self.most = 0  # jobs in a process

    def __call__(self, place: int) -> Process:
        self.started.append(Process(place, self))
        return self.started[-1]


def doubled(item: tuple[int, str], answer: int | WorkerLost, seconds: float) -> int | str:
    assert seconds >= 0
    return answer.kind if isinstance(answer, WorkerLost) else answer


def play(scene: Callable[[JobPool, Processes], Awaitable[None]], seed: int = 0, **settings: Any) -> Processes:
    """Run a scene with a started pool; at its end no process lives and no task is left."""

    async def main() -> Processes:
        processes = Processes(seed)
        settings.setdefault("size", 2)
        settings.setdefault("capacity", 4)
        settings.setdefault("settle", doubled)
        pool = JobPool("the pool", processes, **settings)
        await pool.start()
        async with asyncio.timeout(10):
            await scene(pool, processes)
            members = [member.worker for member in pool.members.values()]
            await pool.end()
        assert all(process.is_dead for process in processes.started if process in members)
        assert len(asyncio.all_tasks()) == 1
        return processes

    return asyncio.run(main())


async def settled(pool: JobPool, size: int = 2) -> None:
    """Wait for the replacements: every process is idle."""
    while len(pool.members) < size or any(member.in_hand for member in pool.members.values()):
        await asyncio.sleep(0)


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_every_job_is_answered_once_whatever_dies(seed: int, independent: bool) -> None:
    chance = random.Random(seed)
    size, capacity = chance.randint(1, 3), chance.randint(1, 6)
    items = [(number, chance.choices(("", DIE, HANG), (8, 1, 1))[0]) for number in range(chance.randint(1, 40))]

    async def scene(pool: JobPool, processes: Processes) -> None:
        submitted = []
        for item in items:
            submitted.append(pool.submit(item))
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        assert await asyncio.gather(*submitted) == [
            "worker_died" if what == DIE else 2 * number for number, what in items
        ]
        await settled(pool, size)
        assert sorted(pool.members) == list(range(size))
        assert all(not member.isolated and not member.retiring for member in pool.members.values())
        queued, restarts = pool.drain_counts()
        assert restarts == len(processes.killed) == len(processes.started) - size
        assert max(queued) < len(items) or size * capacity < len(items)
        assert pool.drain_counts() == ([], 0)

    processes = play(scene, seed, size=size, capacity=capacity, independent=independent)
    assert processes.most <= capacity
    for number, what in items:
        assert sum(process.had.count(number) for process in processes.started) <= 3
        if what == DIE:  # it never took a job along on which two processes had died
            deaths = [moment for moment in processes.last_moments if number in moment]
            assert deaths[-1] == [number]


@pytest.mark.parametrize(("max_lost", "ends"), [(None, False), (3, False), (2, True)])
def test_a_pool_ends_if_it_loses_more_processes_than_allowed(max_lost: int | None, ends: bool) -> None:
    async def scene(pool: JobPool, processes: Processes) -> None:
        answers = []
        for number in range(3):
            processes.gate.clear()
            job = pool.submit((number, WAIT))
            while not (having := [process for process in processes.started if process.has and not process.is_dead]):
                await asyncio.sleep(0)
            having[0].is_dead = True
            while not any(process.has for process in processes.started if not process.is_dead) and not job.done():
                await asyncio.sleep(0)
            processes.gate.set()
            answers += await asyncio.gather(job, return_exceptions=True)
        assert answers[:2] == [0, 2]
        (later,) = await asyncio.gather(pool.submit((9, "")), return_exceptions=True)
        for answer in (answers[2], later):
            assert isinstance(answer, RunError) == ends
        assert not ends or ("3 processes were lost" in str(later) and "max_lost_workers is 2" in str(later))
        if not ends:
            await settled(pool)

    play(scene, max_lost=max_lost)


def test_a_job_that_kills_processes_is_a_failure_of_the_job() -> None:
    """The processes that it has killed do not count as lost."""

    async def scene(pool: JobPool, processes: Processes) -> None:
        for number in range(4):
            assert await pool.submit((number, DIE)) == "worker_died"
        assert await pool.submit((9, "")) == 18
        await settled(pool)

    play(scene, max_lost=2)


def test_a_suspect_runs_alone_while_the_other_process_goes_on() -> None:
    def by_tens(items: Sequence[tuple[int, str]], loads: Mapping[int, int], capacity: int) -> Iterator[int]:
        for number, _ in items:
            if number // 10 not in loads:
                return
            yield number // 10

    async def scene(pool: JobPool, processes: Processes) -> None:
        busy, suspect = [pool.submit((number, WAIT)) for number in range(3)], pool.submit((10, DIE))
        while len(processes.last_moments) < 2:
            await asyncio.sleep(0)
        processes.fuse.clear()
        while len(processes.started) < 4 or not processes.started[3].has:
            await asyncio.sleep(0)
        others = [pool.submit((number, "")) for number in (4, 5, 6, 11)]
        assert await asyncio.gather(*others[:3]) == [8, 10, 12]
        assert not suspect.done() and not any(one.done() for one in busy)
        processes.fuse.set()
        assert await asyncio.gather(suspect, others[3]) == ["worker_died", 22]
        processes.gate.set()
        assert await asyncio.gather(*busy) == [0, 2, 4]

    processes = play(scene, assign=by_tens, capacity=9)
    assert processes.last_moments == [[10], [10], [10]] and processes.started[3].had == [10]


def test_a_process_with_a_hung_call_ends_its_jobs_and_gets_no_more() -> None:
    async def scene(pool: JobPool, processes: Processes) -> None:
        first = [pool.submit(item) for item in ((1, HANG), (2, WAIT))]
        assert await first[0] == 2
        second = [pool.submit((number, "")) for number in range(3, 9)]
        for _ in range(50):
            await asyncio.sleep(0)
        assert not processes.killed and not any(one.done() for one in second)
        processes.gate.set()
        assert await asyncio.gather(*second) == [6, 8, 10, 12, 14, 16]

    processes = play(scene, size=1)
    old, new = processes.started
    assert (old.had, processes.killed, new.place) == ([1, 2], [old, new], 0)


@pytest.mark.parametrize(("deaths", "starts"), [(2, True), (3, False)])
def test_a_process_that_dies_while_it_starts_is_started_three_times(deaths: int, starts: bool) -> None:
    """Where it does not start, nothing can be answered any more: waiting jobs and later ones fail."""

    async def scene(pool: JobPool, processes: Processes) -> None:
        processes.deaths_at_start = deaths
        jobs = [pool.submit((number, DIE if number == 1 else "")) for number in range(1, 9)]
        found = await asyncio.gather(*jobs, return_exceptions=True)
        found += await asyncio.gather(pool.submit((9, "")), return_exceptions=True)
        if starts:
            assert found == ["worker_died", *range(4, 20, 2)]
        else:
            assert all(isinstance(one, RunError) for one in found)
            assert "the pool: a worker failed to start; its process ended 3 times: the node is full" in str(found[-1])

    play(scene, size=1)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("independent", [False, True])
def test_a_cancelled_job_gives_its_place_back(independent: bool, started: bool) -> None:
    """Always before it is sent; in a process only if jobs are independent and no job of the call is needed."""

    async def scene(pool: JobPool, processes: Processes) -> None:
        unneeded = [pool.submit((number, WAIT)) for number in range(4)]
        if started:
            while not processes.started[0].has:
                await asyncio.sleep(0)
        for one in unneeded:
            one.cancel()
        needed = pool.submit((9, ""))
        for _ in range(50):
            await asyncio.sleep(0)
        assert needed.done() == (independent or not started)
        processes.gate.set()
        assert await needed == 18
        await settled(pool, 1)

    processes = play(scene, size=1, independent=independent)
    assert processes.started[0].had == ([0, 1, 2, 3, 9] if started else [9])


@pytest.mark.parametrize("independent", [False, True])
def test_a_process_gets_jobs_after_each_answer_or_after_the_last(independent: bool) -> None:
    async def scene(pool: JobPool, processes: Processes) -> None:
        jobs = [pool.submit((number, WAIT if number == 1 else "")) for number in range(4)]
        for _ in range(50):
            await asyncio.sleep(0)
        assert [job.done() for job in jobs] == [True, False, independent, independent]
        processes.gate.set()
        assert await asyncio.gather(*jobs) == [0, 2, 4, 6]

    assert play(scene, size=1, capacity=2, independent=independent).most <= 2


def test_a_bug_in_a_worker_or_in_the_result_fails_the_jobs_of_the_call() -> None:
    def settle(item: tuple[int, str], answer: int, seconds: float) -> int:
        return 1 // item[0]

    async def scene(pool: JobPool, processes: Processes) -> None:
        for item, message in (((5, RAISE), "the pool: 'a bug'"), ((6, FORGET), "the pool: a worker left 1 jobs")):
            with pytest.raises(RunError, match=message):
                await pool.submit(item)
        with pytest.raises(ZeroDivisionError):
            await pool.submit((0, ""))
        assert await pool.submit((1, "")) == 1

    assert len(play(scene, settle=settle).started) == 2


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_contiguous_and_equal_where_there_is_room(seed: int) -> None:
    chance = random.Random(seed)
    capacity, items = chance.randint(1, 9), list(range(chance.randint(0, 40)))
    loads = {number: chance.randint(0, capacity) for number in range(chance.randint(1, 5))}
    numbers = list(in_equal_shares(items, loads, capacity))
    assert len(list(groupby(numbers))) == len(set(numbers))
    rooms = [capacity - load for load in loads.values()]
    assert len(numbers) == min(len(items), sum(rooms))
    shares = [numbers.count(number) for number in loads]
    assert all(share <= room for share, room in zip(shares, rooms, strict=True))
    unlimited = [share for share, room in zip(shares, rooms, strict=True) if share < room]
    assert not unlimited or max(unlimited) - min(unlimited) <= 1


@pytest.mark.parametrize(
    ("answers", "is_alive", "until", "is_lost"),
    [
        (0.01, False, 9.0, False),
        (0.3, True, 9.0, False),
        (None, False, 9.0, True),
        (None, True, 0.3, True),
    ],
    ids=["answers", "is slow", "does not reply", "is out of time"],
)
def test_a_silent_process_is_lost_if_it_does_not_reply_or_is_out_of_time(
    answers: float | None, is_alive: bool, until: float, is_lost: bool
) -> None:
    async def main() -> Answers | None:
        loop = asyncio.get_running_loop()

        async def receive() -> Answers:
            await (asyncio.sleep(answers) if answers else asyncio.Event().wait())
            return Answers([], hung=False)

        def alive() -> asyncio.Future[None]:
            reply = loop.create_future()
            if is_alive:
                reply.set_result(None)
            return reply

        return await next_answer(receive(), alive, 0.05, loop.time() + until)

    if is_lost:
        with pytest.raises(WorkerLost, match="is stuck") as lost:
            asyncio.run(main())
        assert lost.value.kind == "timeout"
    else:
        assert asyncio.run(main()) == Answers([], hung=False)


def test_the_first_failure_of_a_kind_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    log = FailureLog("runs", "are left out", "workflow/failed")
    for kind in ("raised", "timeout", "raised"):
        log.add_failure(kind, f"it {kind}")
    warnings = " ".join(capsys.readouterr().err.split())
    assert warnings.count("it raised Such runs are left out, and are counted as workflow/failed/raised") == 1
    assert warnings.count("it timeout") == 1


@pytest.mark.parametrize(
    ("must_succeed", "success", "ends"), [(True, None, True), (False, None, False), (True, 5, False)]
)
def test_a_run_whose_first_jobs_all_fail_ends_if_it_needs_one(must_succeed: bool, success: int, ends: bool) -> None:
    log = FailureLog("runs", "are left out", "workflow/failed", must_succeed=must_succeed)
    for number in range(1, 2 * MAX_INITIAL_FAILURES):
        if number == success:
            log.add_success()
        if ends and number == MAX_INITIAL_FAILURES:
            with pytest.raises(RunError, match="the first 32 runs have all failed; the last one: no idea"):
                log.add_failure("raised", "no idea")
            break
        log.add_failure("raised", "no idea")


@ray.remote(max_concurrency=100)
class Doubler:
    """A real process that doubles numbers; negative ones take for ever."""

    async def setup(self, factor: int) -> None:
        self._factor, self.begun, self.cancelled = factor, 0, 0

    async def run(self, numbers: Sequence[int]) -> AsyncGenerator[Answers, None]:
        for place, number in enumerate(numbers):
            self.begun += 1
            try:
                await (asyncio.sleep(0) if number >= 0 else asyncio.Event().wait())
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            yield Answers([(place, self._factor * number)], hung=False)

    async def alive(self) -> None:
        pass

    async def state(self) -> tuple[int, int, int]:
        return os.getpid(), self.begun, self.cancelled


def real_pool(options: dict[str, Any], **settings: Any) -> JobPool[int, int]:
    def spawn(number: int) -> RayWorker:
        return RayWorker("the pool", Doubler.options(**options).remote(), (2,), **settings)

    return JobPool("the pool", spawn, lambda item, answer, seconds: answer, 1, 8, independent=True)


async def state_of(pool: JobPool[int, int]) -> tuple[int, int, int]:
    return await pool.members[0].worker.actor.state.remote()


@pytest.mark.parametrize(
    ("signal_number", "settings"),
    [
        pytest.param(signal.SIGKILL, {}, id="killed"),
        pytest.param(signal.SIGSTOP, {"limit": 1.0}, id="stopped, out of time", marks=pytest.mark.nightly),
        pytest.param(signal.SIGSTOP, {"patience": 0.5}, id="stopped, no reply"),
    ],
)
def test_the_jobs_of_a_real_process_that_is_lost_run_again(
    warm_options: dict[str, Any], loop: asyncio.AbstractEventLoop, signal_number: int, settings: dict[str, float]
) -> None:
    async def main() -> None:
        pool = real_pool(warm_options, **settings)
        await pool.start()
        process = (await state_of(pool))[0]
        os.kill(process, signal_number)
        async with asyncio.timeout(30):
            assert await asyncio.gather(*[pool.submit(number) for number in range(3)]) == [0, 2, 4]
        assert pool.drain_counts()[1] == 1 and (await state_of(pool))[0] != process
        await pool.end()

    loop.run_until_complete(main())


def test_a_cancelled_job_is_cancelled_in_its_real_process(
    warm_options: dict[str, Any], loop: asyncio.AbstractEventLoop
) -> None:
    async def main() -> None:
        pool = real_pool(warm_options)
        await pool.start()
        quick, endless = pool.submit(1), pool.submit(-1)
        assert await quick == 2
        async with asyncio.timeout(30):
            while (await state_of(pool))[1] < 2:  # a job cancelled earlier never begins
                await asyncio.sleep(0.02)
            endless.cancel()
            while (await state_of(pool))[2] == 0:
                await asyncio.sleep(0.02)
        assert await pool.submit(3) == 6 and pool.drain_counts()[1] == 0
        await pool.end()

    loop.run_until_complete(main())
