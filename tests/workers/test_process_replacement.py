"""Lost processes are replaced: real processes that are killed or stopped."""

import asyncio
import os
import signal
import time
from typing import Any

import psutil
import pytest
import ray

from roll_opd.base.failures import RunError
from roll_opd.cluster.lost_processes import HOUR, Loss, Losses, LossLimit, NotServing, NotSetUp, ProcessDied, Starting
from roll_opd.cluster.startup_progress import StartupProgress
from roll_opd.weight_sync.send_weights import SharedMemorySync
from roll_opd.workers import liveness, process_replacement
from roll_opd.workers.actor_group import ActorGroup, Batches
from roll_opd.workers.liveness import watched
from roll_opd.workers.process_replacement import Renewal, attended
from roll_opd.workers.sampler import RequestLosses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("started_as_forks")]
OPTIONS: dict[str, Any] = {"max_restarts": -1}  # Ray's, of the processes


@pytest.fixture(scope="module")
def started_as_forks(warm_options: dict[str, Any]) -> None:
    OPTIONS.update(warm_options)


@ray.remote
class Actor:
    """Loses what it was given when its process is started again."""

    given: str | None = None

    def __init__(self, seconds_of_a_restart: float = 0.0) -> None:
        if ray.get_runtime_context().was_current_actor_reconstructed:
            time.sleep(seconds_of_a_restart)

    def pid(self) -> int:
        return os.getpid()

    def setup(self, given: str, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        liveness.BEAT_INTERVAL_S = 0.5
        liveness.beat_in_thread()
        self.given = given

    def host(self) -> str:
        return "here"

    def begin_update(self, version: int) -> None:
        """As an engine."""

    def export_weights(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no weights")

    def fail(self) -> None:
        raise RuntimeError("Connection closed by peer")

    def slow(self, seconds: float) -> str | None:
        time.sleep(seconds)
        return self.given


class Case:
    """A group of two actors that is replaced as a whole."""

    def __init__(self, seconds_of_a_restart: float = 0.0) -> None:
        self.group = ActorGroup(
            [Actor.options(**OPTIONS).remote(seconds_of_a_restart) for _ in range(2)],
            ("role, rank 0,", "role, rank 1,"),
        )
        self.losses: list[Loss] = []
        self.failures: list[Exception] = []
        self.starts = 0
        self.starting = StartupProgress(say=lambda text: None)
        self.seconds_of_a_start = 0.0

    async def begin(self, most: int | None = None) -> None:
        await self._setup()
        limits = Losses(most, self.losses.append, self.failures.append)
        self.renewal = Renewal("role", "role", [*self.group.actors], self._setup, limits, self.starting)
        self.group.renewals = (self.renewal, self.renewal)

    async def _setup(self) -> None:
        self.starts += 1
        await self.group.call("setup", "state", self.seconds_of_a_start)

    async def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(await self.group.ask(rank, "pid"), number)

    async def slow(self) -> list[str | None]:
        """Call as `WorkerGroup` does: again after a loss."""
        life = self.renewal.life
        try:
            return await self.group.call("slow", 0.5)
        except ProcessDied as died:
            await self.renewal.since(life, str(died))
            return await self.group.call("slow", 0.0)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def test_a_call_that_loses_a_process_is_answered_by_new_ones() -> None:
    async def main() -> Case:
        case = Case()
        await case.begin()
        before = [await case.group.ask(rank, "pid") for rank in range(2)]
        calling = asyncio.gather(case.slow(), case.slow())  # two callers share one renewal
        await asyncio.sleep(0.2)
        psutil.Process(before[1]).kill()
        assert await calling == [["state", "state"]] * 2
        after = [await case.group.ask(rank, "pid") for rank in range(2)]
        assert not set(before) & set(after)
        case.group.end()
        return case

    case = run(main())
    assert case.starts == 2 and case.renewal.life == 1 and len(case.losses) == 1 and not case.failures


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_process_is_replaced_without_a_call(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed, and one that does not react any more.

    The start of a process and its set-up may take longer than a process may hang.
    """
    monkeypatch.setattr(liveness, "POLL_INTERVAL_S", 0.2)
    fatal: list[str] = []
    patience = 3.0

    async def main() -> Case:
        kills = number == signal.SIGKILL
        case = Case(patience + 1.0 if kills else 0.0)
        await case.begin()
        case.seconds_of_a_start = 0.0 if kills else patience + 1.0
        with watched(fatal.append, patience, lambda text: None):
            await case.kill(0, number)
            while not case.renewal.life:
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
        assert await case.group.call("slow", 0.0) == ["state", "state"]
        restarts = [count for _, count, _ in liveness.starts_of([*case.group.actors]).values()]
        assert restarts == [1, 1] or number == signal.SIGSTOP  # Ray needs seconds to kill a stopped process
        case.group.end()
        return case

    case = run(main())
    assert case.starts == 2 and len(case.losses) == 1 and not (fatal or case.failures)
    assert case.losses[0].why.startswith("role, rank 0, has died: ")


def test_calls_that_depend_on_each_other_report_the_process_that_died() -> None:
    """Its peer's collective fails before Ray reports the end of the process."""

    async def main() -> None:
        case = Case()
        await case.begin()
        calls = asyncio.ensure_future(case.group.together([case.group.ask(0, "fail"), case.group.ask(1, "slow", 60.0)]))
        await asyncio.sleep(1.0)
        assert not calls.done()
        await asyncio.to_thread(kill_actor, case.group.actors[1])
        with pytest.raises(ProcessDied, match="role, rank 1, has died"):
            await calls
        case.group.end()

    run(main())


def kill_actor(actor: Any) -> None:
    ray.kill(actor, no_restart=False)


def test_too_many_losses_end_the_run() -> None:
    async def main() -> Case:
        case = Case()
        await case.begin(most=1)
        for _ in range(2):
            await case.kill(1)
            await asyncio.gather(case.slow(), return_exceptions=True)
        with pytest.raises(RunError, match="max_lost_workers is 1"):  # also for a later caller
            await case.renewal.since(case.renewal.life, "")
        assert not case.renewal.is_up
        case.group.end()
        return case

    case = run(main())
    assert len(case.losses) == 1 and len(case.failures) == 1


def test_starts_that_never_end_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_replacement, "RETRY_S", 0.1)

    async def main() -> Case:
        case = Case()
        await case.begin()
        case.starting.seconds, case.seconds_of_a_start = 3.0, 3600.0
        await case.kill(0)
        with pytest.raises(RunError, match=r"new processes of role failed to start 3 times: .*startup_timeout_s"):
            await case.renewal.since(0, "")
        case.group.end()
        return case

    case = run(main())
    assert len(case.failures) == 1 and not case.losses


def test_a_lost_engine_is_one_loss_of_a_request_until_it_starts_again() -> None:
    losses, dead = RequestLosses(), ray.exceptions.ActorUnavailableError("dead", b"0" * 16)
    errors = [(0, dead), (0, dead), (1, dead), (0, Starting()), (0, dead)]  # its new process was lost in its start
    errors += [(0, NotSetUp()), (0, NotServing()), (1, dead), (0, dead)]
    counts = []
    for engine, error in errors:
        losses.add(engine, 0, error)
        counts.append(losses.count)
    assert counts == [1, 1, 2, 2, 2, 2, 2, 2, 3]  # the request ends the process of engine 0 again
    losses.add(1, 1, dead)  # in its next life
    assert losses.count == 4


def test_losses_count_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("roll_opd.cluster.lost_processes.time.monotonic", lambda: now[0])
    limit = LossLimit("role", 2)
    for number, hours in enumerate((0.0, 0.6, 1.2, 1.3)):
        now[0] = hours * HOUR
        limit.add(number)
        assert (limit.exceeded("it") is not None) == (number == 3)  # the first is forgotten at the third
    limit.forgive({2})
    assert limit.exceeded("it") is None


def test_replaced_processes_are_attended_to_while_work_goes_on() -> None:
    async def main() -> None:
        before, returned, seen = asyncio.all_tasks(), asyncio.Event(), []
        work: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def act() -> None:
            seen.append(len(seen))
            if len(seen) == 2:
                work.set_result("done")

        async def come_back() -> None:
            for _ in range(2):
                await asyncio.sleep(0.01)
                returned.set()

        back = asyncio.ensure_future(come_back())
        assert await attended(work, returned, act) == "done" and seen == [0, 1]
        await back
        returned.set()
        failing = asyncio.ensure_future(attended(asyncio.sleep(60), returned, lambda: 1 / 0))  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            await failing
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == before  # the work was cancelled

    run(main())


def test_no_batch_runs_beside_an_exclusive_block() -> None:
    async def main() -> None:
        batches, running, seen = Batches(), 0, []

        async def batch() -> None:
            nonlocal running
            async with batches.one():
                running += 1
                await asyncio.sleep(0)
                seen.append(running)
                running -= 1

        async def alone() -> None:
            async with batches.none():
                assert not running
                await asyncio.sleep(0)
                assert not running

        await asyncio.gather(*[work() for _ in range(9) for work in (batch, alone, batch)])
        assert max(seen) > 1  # batches run beside each other

    run(main())


def test_engines_lack_weights_after_they_were_replaced() -> None:
    """A transfer goes to those that run; a replaced engine gets weights again."""

    class Engines(ActorGroup):
        gone = False
        lives = 0

        def is_up(self, actor: int) -> bool:
            return not (actor == 1 and self.gone)

        def life(self, actor: int) -> int:
            return self.lives if actor == 1 else 0

    engines = Engines([object() for _ in range(3)])  # type: ignore[misc]
    sync = SharedMemorySync(ActorGroup([]), engines, "fp32")
    assert sync.lacking() == [0, 1, 2]
    engines.gone = True
    there = run(sync._receivers(only_lacking=False))
    assert [one.number for one in there] == [0, 2]
    sync._end(there)
    assert sync.lacking() == []
    engines.gone, engines.lives = False, 1
    assert sync.lacking() == [1] == [one.number for one in run(sync._receivers(only_lacking=True))]


def test_engines_of_a_transfer_that_lost_its_sender_are_replaced() -> None:
    """Their cores wait for the rest of the weights. An engine that was not asked to begin stays."""

    async def main() -> None:
        replaced, losses = [], Losses(0)
        student, lost, engines = (
            ActorGroup([Actor.options(**OPTIONS).remote()], (name,)) for name in ("student,", "student,", "engine,")
        )
        ray.kill(lost.actors[0])

        async def setup() -> None:
            replaced.append(0)
            await engines.call("setup", "state")

        await engines.call("setup", "state")
        engines.renewals = (Renewal("role", "engine", [*engines.actors], setup, losses, StartupProgress()),)
        sync = SharedMemorySync(lost, engines, "fp32")
        with pytest.raises(ProcessDied):
            await sync.push(1)
        assert not (replaced or sync.has_failed) and len(await sync._receivers(only_lacking=False)) == 1
        sync.student = student
        with pytest.raises(ray.exceptions.RayTaskError, match="no weights"):
            await sync.push(1)
        assert not replaced and engines.life(0) == 0 and sync.has_failed
        assert len(await sync._receivers(only_lacking=False)) == 1 and replaced == [0] and engines.life(0) == 1
        assert not sync.has_failed
        student.end()
        engines.end()

    run(main())
