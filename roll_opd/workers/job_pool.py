"""Pool of reward or workflow processes that can be replaced. `liveness` watches the processes of models and engines.

If a process dies or is stuck, its jobs run again in a different process. A process gets only as many jobs as it may run
concurrently. Further jobs wait in the driver until a process has room.

A job that has lost its process twice runs the third time in a process without other jobs. If this process is lost too,
the pool assumes that the job is the cause. `settle` then gets a `WorkerLost` as the answer of the job.

If the pool knows which answers are failures, jobs that fail because of an outage run again; see `outage`.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from roll_opd.base.failures import RunError
from roll_opd.base.terminal import warn
from roll_opd.cluster.lost_processes import LossLimit
from roll_opd.workers.batched_calls import Answers
from roll_opd.workers.outage import Outage, Problem

MAX_DEATHS = 3  # after this many lost workers, the job that they ran counts as the cause
MAX_INITIAL_FAILURES = 32  # after this many failed jobs without a success, the setup counts as the cause

Item = TypeVar("Item")
Result = TypeVar("Result")
# (waiting items, number of each worker that accepts jobs -> number of its jobs, capacity of a worker) -> worker number
# for each of the first items; further items wait
Assign = Callable[[Sequence[Any], Mapping[int, int], int], Iterable[int]]


class WorkerLost(Exception):
    """A worker has died or is stuck.

    `kind` is the name of this failure in metrics.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Worker(Protocol):
    """One process of a pool."""

    async def setup(self) -> None:
        """Prepare the process.

        Raises WorkerLost if the process ends, and RunError if the setup fails.
        """

    def run(self, items: Sequence[Any]) -> AsyncGenerator[Answers, None]:
        """Run jobs together, and yield their answers as they finish.

        Raises WorkerLost if the process is lost.
        """

    def kill(self) -> None:
        """End the process."""


@dataclass(eq=False)
class _Job(Generic[Item, Result]):
    item: Item
    result: "asyncio.Future[Result]"
    submitted: float
    losses: set[int] = field(default_factory=set)  # the lost workers that ran this job
    is_attempt: bool = False  # made by `Outage`; its result is the answer

    @property
    def deaths(self) -> int:
        return len(self.losses)

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # marks it as retrieved; asyncio logs exceptions that are never retrieved


@dataclass(eq=False)
class Member:
    """A worker of the pool, and its load."""

    worker: Worker
    number: int  # a replacement gets the same number
    in_hand: int = 0  # jobs
    retiring: bool = False  # accepts no more jobs and is replaced after its last job
    isolated: bool = False  # runs only one job, which may kill it


def in_equal_shares(items: Sequence[Any], loads: Mapping[int, int], capacity: int) -> Iterator[int]:
    """Yield a worker number for each item, until all workers are full.

    Each worker gets a contiguous block of items. The blocks are as equal in size as the free capacities permit.

    Args:
        loads: number of jobs of each worker, by the worker's number.
        capacity: maximum number of concurrent jobs of a worker.
    """
    left = len(items)
    for place, number in enumerate(sorted(loads, key=lambda number: -loads[number])):
        share = min(left // (len(loads) - place), capacity - loads[number])
        yield from [number] * share
        left -= share


class JobPool(Generic[Item, Result]):
    """Pool that runs jobs in workers.

    All methods must be called from one event loop.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[int], Worker],
        settle: Callable[[Item, Any, float], Result],
        size: int,
        capacity: int,
        assign: Assign = in_equal_shares,
        *,
        independent: bool = False,
        max_lost: int | None = None,
        failure: Callable[[Any], Problem | None] | None = None,
    ) -> None:
        """Create the pool; `start` starts its workers.

        Args:
            name: name of the pool in error messages.
            spawn: starts the worker with a given number, from 0 to `size` - 1.
            settle: computes the result of a job. Its arguments are the item of the job, the answer (or a `WorkerLost`),
                and the seconds since `submit`. If it raises an exception, the future of the job raises this exception.
            size: number of workers.
            capacity: maximum number of concurrent jobs of a worker.
            assign: selects a worker for each job.
            independent: whether jobs that are sent together are independent of each other. If they are, waiting jobs
                are sent whenever one job of a worker finishes, and not only when all its jobs have finished. A call to
                a worker is cancelled when the futures of all its jobs are done and one of them was cancelled.
            max_lost: number of lost workers that the pool tolerates within an hour; None means no limit. Each lost
                worker counts once, and a loss that was caused by a job does not count.
            failure: returns the failure that an answer states, or None for a success. If it is given, jobs that fail
                because of an outage run again.
        """
        self.name, self._spawn, self._settle_job = name, spawn, settle
        self._size, self._capacity, self._assign, self._independent = size, capacity, assign, independent
        self.members: dict[int, Member] = {}
        self._waiting: list[_Job[Item, Result]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._dispatch_is_due = False
        self._broken: BaseException | None = None
        self._queued: list[int] = []
        self._restarts = 0
        self._numbers = itertools.count()
        self._lost = LossLimit(name, max_lost)  # counts the lost workers that no job has caused
        self._failure = failure
        self._outage: Outage[_Job[Item, Result]] = Outage(name, self._attempt, self._problem, self._settle_now)

    async def start(self) -> None:
        """Start the workers and wait until they are ready."""
        await asyncio.gather(*[self._add(number) for number in range(self._size)])

    def submit(self, item: Item) -> "asyncio.Future[Result]":
        """Submit a job; return a future of its result.

        The future raises RunError if the job cannot run. Cancel the future if its result is not needed.
        """
        loop = asyncio.get_running_loop()
        job: _Job[Item, Result] = _Job(item, loop.create_future(), time.monotonic())
        if self._broken:
            job.fail(self._broken)
            return job.result
        self._waiting.append(job)
        if not self._dispatch_is_due:  # jobs that are submitted together are sent together
            self._dispatch_is_due = True
            loop.call_soon(self._dispatch)
        return job.result

    def drain_counts(self) -> tuple[list[int], int]:
        """Return (queue length after each dispatch, number of restarts), both since the last call."""
        counts = self._queued, self._restarts
        self._queued, self._restarts = [], 0
        return counts

    def drain_outage_seconds(self) -> float:
        """Return the seconds of outages that have ended since the last call."""
        return self._outage.drain_seconds()

    async def end(self) -> None:
        """Kill the workers."""
        members, self.members = self.members, {}
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in members.values():
            member.worker.kill()

    def _dispatch(self) -> None:
        """Send waiting jobs to workers that have room.

        A job that may have killed two workers is sent to an idle worker, as its only job.
        """
        self._dispatch_is_due = False
        waiting = [job for job in self._waiting if not job.result.done()]
        paused = [job for job in waiting if not job.is_attempt] if self._outage.is_on else []
        waiting = [job for job in waiting if job.is_attempt] if self._outage.is_on else waiting
        suspects = [job for job in waiting if job.deaths == MAX_DEATHS - 1]
        others = [job for job in waiting if job.deaths < MAX_DEATHS - 1]
        accepting = [member for member in self.members.values() if not member.retiring and not member.isolated]
        accepting.sort(key=lambda member: member.in_hand, reverse=True)
        while suspects and accepting:
            member = accepting.pop()
            if member.in_hand:
                break  # the least busy worker gets no more jobs until it is idle
            member.isolated = True
            self._send(member, [suspects.pop(0)])
        loads = {member.number: member.in_hand for member in accepting}
        numbers = list(self._assign([job.item for job in others], loads, self._capacity))
        batches: defaultdict[int, list[_Job[Item, Result]]] = defaultdict(list)
        for number, job in zip(numbers, others, strict=False):
            batches[number].append(job)
        for number, jobs in batches.items():
            self._send(self.members[number], jobs)
        self._waiting = suspects + others[len(numbers) :] + paused
        self._queued.append(len(self._waiting))

    def _send(self, member: Member, jobs: list[_Job[Item, Result]]) -> None:
        left = dict(enumerate(jobs))
        member.in_hand += len(left)
        task = self._background(self._follow(member, left))

        def ended(_: object) -> None:
            member.in_hand -= len(left)
            self._advance(member)

        def cancel_unneeded(result: "asyncio.Future[Result]") -> None:
            if result.cancelled() and all(job.result.done() for job in jobs):
                task.cancel()

        task.add_done_callback(ended)
        for job in jobs if self._independent else ():
            job.result.add_done_callback(cancel_unneeded)

    async def _follow(self, member: Member, left: dict[int, _Job[Item, Result]]) -> None:
        """Settle each job when the worker answers it.

        If the worker is lost, the jobs without an answer are queued again.

        Args:
            left: jobs without an answer, by their place in the request.
        """
        stream = member.worker.run([job.item for job in left.values()])
        try:
            async for answers in stream:
                member.retiring |= answers.hung
                for place, answer in answers.results:
                    member.in_hand -= 1
                    self._settle(left.pop(place), answer)
                if self._independent:
                    self._advance(member)
            if left:
                raise RunError(f"{self.name}: a worker left {len(left)} jobs unanswered")
        except WorkerLost as lost:
            self._retire(member, f"{lost}, and its {len(left)} unfinished jobs run again")
            self._count_lost(list(left.values()), lost)
        except Exception as error:
            for job in left.values():
                job.fail(error if isinstance(error, RunError) else RunError(f"{self.name}: {error}"))
        finally:
            await stream.aclose()

    def _advance(self, member: Member) -> None:
        if not member.in_hand:
            member.isolated = False
            if member.retiring:
                self._retire(member, "has calls that exceeded their time limit")
        self._dispatch()

    def _settle(self, job: _Job[Item, Result], answer: Any) -> None:
        if job.is_attempt:
            if not job.result.done():
                job.result.set_result(answer)
        elif self._failure is None or isinstance(answer, WorkerLost) or self._broken:
            self._settle_now(job, answer)
        elif (problem := self._failure(answer)) is None:
            self._outage.note_success(job.item)
            self._settle_now(job, answer)
        elif problem.is_final or (self._outage.control is None and not problem.of_a_service):
            self._settle_now(job, answer)
        elif self._outage.hold(job, problem):
            self._background(self._test_failures())

    async def _test_failures(self) -> None:
        await self._outage.test()
        self._dispatch()  # jobs that were not sent during an outage

    async def _attempt(self, item: Item) -> Any:
        """Run the item of an earlier job, before all waiting jobs, and return the answer."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.insert(0, _Job(item, result, time.monotonic(), is_attempt=True))
        self._dispatch()
        return await result

    def _problem(self, answer: Any) -> Problem | None:
        assert self._failure
        return Problem(answer.kind, str(answer)) if isinstance(answer, WorkerLost) else self._failure(answer)

    def _settle_now(self, job: _Job[Item, Result], answer: Any) -> None:
        try:
            result = self._settle_job(job.item, answer, time.monotonic() - job.submitted)
        except Exception as error:
            job.fail(error)
        else:
            if not job.result.done():
                job.result.set_result(result)

    def _count_lost(self, jobs: Sequence[_Job[Item, Result]], lost: WorkerLost) -> None:
        """Count a lost worker, and queue its unfinished jobs again.

        If more than `max_lost` workers were lost within an hour, all waiting and later jobs fail. The workers that were
        lost with a job that counts as the cause are no longer counted, each of them once.
        """
        number = next(self._numbers)
        self._lost.add(number)
        for job in jobs:
            job.losses.add(number)
            if self._broken:
                job.fail(self._broken)
            elif job.deaths == MAX_DEATHS:
                self._lost.forgive(job.losses)
                message = (
                    f"{MAX_DEATHS} workers were lost ({lost.kind}) while they ran this job; the last worker ran no"
                    " other job"
                )
                self._settle(job, WorkerLost(lost.kind, message))
        self._waiting = [job for job in jobs if not job.result.done()] + self._waiting
        if error := self._lost.exceeded(str(lost)):
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """Let all waiting and all later jobs fail with `error`."""
        self._broken = error
        for job in self._waiting:
            job.fail(error)

    def _retire(self, member: Member, problem: str) -> None:
        if self.members.get(member.number) is not member:
            return  # already replaced after another batch
        del self.members[member.number]
        member.worker.kill()
        self._restarts += 1
        warn(f"a worker of {self.name} {problem}; a new worker replaces it")
        self._background(self._replace(member.number))

    async def _replace(self, number: int) -> None:
        await self._add(number)
        self._dispatch()

    async def _add(self, number: int) -> None:
        for _ in range(MAX_DEATHS):
            worker = self._spawn(number)
            try:
                await worker.setup()
            except WorkerLost as lost:
                problem = lost
            else:
                self.members[number] = Member(worker, number)
                return
        raise RunError(
            f"{self.name}: a worker failed to start; its process ended {MAX_DEATHS} times: {problem}"
        ) from problem

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._break(error)  # a worker cannot be replaced


@dataclass
class FailureLog:
    """Log of a pool's failed jobs.

    It warns of the first failure of each kind, and ends a run that cannot continue. It does not count the failures of
    each kind.
    """

    jobs: str  # name of the jobs in messages
    consequence: str  # consequence of a failure, such as "are left out"
    metric: str  # prefix of the counts by kind
    remedy: str | None = None  # remedy for a failure that ends the run; None: failures do not end it
    must_succeed: bool = True  # the run ends if the first MAX_INITIAL_FAILURES jobs all fail
    _initial: int | None = 0  # failures before the first success; None after it
    _kinds: set[str] = field(default_factory=set)

    def add_success(self) -> None:
        """Record that a job succeeded."""
        self._initial = None

    def add_failure(self, kind: str, text: str) -> None:
        """Record that a job failed; warn if this is the first failure of its kind.

        Raises RunError if the failure ends the run.
        """
        if self.remedy:
            raise RunError(f"{text}; {self.remedy}")
        if self._initial is not None:
            self._initial += 1
            if self._initial == MAX_INITIAL_FAILURES and self.must_succeed:
                raise RunError(f"the first {self._initial} {self.jobs} have all failed; the last one: {text}")
        if kind not in self._kinds:
            self._kinds.add(kind)
            warn(f"{text}\nSuch {self.jobs} {self.consequence}, and are counted as {self.metric}/{kind}")
