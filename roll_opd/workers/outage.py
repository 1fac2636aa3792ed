"""Distinguish failures that jobs cause from an outage of a service that jobs need.

A failed job of a pool waits, and the last job that succeeded runs again, as a control.

- The control fails: a service is down. No further job starts. The control and a failed job run again, after increasing
  pauses, until one of them succeeds. After `LIMIT_S` the run ends.
- The control succeeds: the failed job runs again, and a second failure is final. But if its error states that a service
  failed (`base.failures`), the control may not have needed this service. Such a job runs again after increasing pauses,
  while other jobs continue. After `DOUBT_S` without a success, this failure is final, and so are later failures of its
  kind. If `MANY` jobs have failed by then, and more than have succeeded, a service is down.
- No job has succeeded yet, so there is no control: a job whose error states that a service failed runs again in the
  same way, and after `DOUBT_S` without a success the run ends. All other failures are final.
"""

import asyncio
import itertools
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from roll_opd.base.failures import RunError
from roll_opd.base.terminal import echo, warn
from roll_opd.cluster.stall_watchdog import WAITS

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0  # pauses between two attempts; they double
LIMIT_S = 600.0  # an outage of this length ends the run
DOUBT_S = 90.0  # time for failures of a service that only some jobs notice
MANY = 32  # failed jobs that can hardly have one cause in each of them


@dataclass(frozen=True)
class Problem:
    """Why a job failed."""

    kind: str  # counted by name
    message: str
    of_a_service: bool = False  # whether its error states that a service failed
    is_final: bool = False  # whether the job does not run again


class HeldJob(Protocol):
    """A job of a pool."""

    item: Any
    result: "asyncio.Future[Any]"

    def fail(self, error: BaseException) -> None:
        """Let the job fail."""


Job = TypeVar("Job", bound=HeldJob)


class Outage(Generic[Job]):
    """The failed jobs of a pool that will run again, and whether an outage is in progress.

    All methods must be called from one event loop.
    """

    def __init__(
        self,
        name: str,
        attempt: Callable[[Any], Coroutine[Any, Any, Any]],
        problem: Callable[[Any], Problem | None],
        settle: Callable[[Job, Any], None],
    ) -> None:
        """Start without failed jobs.

        Args:
            name: name of the pool in messages.
            attempt: runs an item and returns its answer.
            problem: returns the failure that an answer states, or None for a success.
            settle: gives a job its answer.
        """
        self._name, self._attempt, self._problem = name, attempt, problem
        self._settle = settle
        self.control: Any = None  # item of the last job that succeeded
        self.is_on = False
        self._held: list[Job] = []
        self._is_testing = False
        self._seconds, self._successes = 0.0, 0
        self._last = Problem("", "")  # failure of the last held job
        self._of_jobs: set[str] = set()  # kinds of a service's failures that jobs cause

    def note_success(self, item: Any) -> None:
        """Record the item of a job that succeeded at its first run."""
        self.control = item
        self._successes += 1

    def hold(self, failed: Job, problem: Problem) -> bool:
        """Keep a failed job, which `test` decides about. Return whether the caller must start `test`."""
        self._held.append(failed)
        self._last = problem
        must_start, self._is_testing = not self._is_testing, True
        return must_start

    def drain_seconds(self) -> float:
        """Return the seconds of outages that have ended since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def test(self) -> None:
        """Run the kept jobs again until each has succeeded or finally failed.

        Raises RunError if an outage does not end. Any error of this method is the failure of the jobs that are left.
        """
        try:
            while jobs := self._needed():
                if self.control is None:
                    await self._wait(self._last, [])
                    continue
                (answer,) = await self._answers([self.control])
                if problem := self._problem(answer):
                    await self._wait(problem, [self.control])
                    continue
                answers = await self._answers([job.item for job in jobs])
                problems = [self._settled(job, answer) for job, answer in zip(jobs, answers, strict=True)]
                if doubtful := next(filter(None, problems), None):
                    await self._wait(doubtful, [])
        except Exception as error:
            for job in self._held:
                job.fail(error)
            raise
        finally:
            self._is_testing = False

    def _settled(self, job: Job, answer: Any) -> Problem | None:
        """Settle a held job with its last answer; return its failure instead if it is one of a service."""
        problem = self._problem(answer)
        if problem and problem.of_a_service and problem.kind not in self._of_jobs:
            return problem
        self._held.remove(job)
        self._settle(job, answer)
        return None

    def _needed(self) -> list[Job]:
        self._held = [job for job in self._held if not job.result.done()]
        return list(self._held)

    async def _answers(self, items: Sequence[Any]) -> list[Any]:
        return await asyncio.gather(*map(self._attempt, items))

    async def _wait(self, problem: Problem, controls: Sequence[Any]) -> None:
        """Run held jobs again, and the controls, until one of them succeeds.

        Args:
            controls: items that had succeeded and have failed. If there are none, it may be no outage.

        Raises RunError if the outage does not end, or if no job has ever succeeded.
        """
        now = asyncio.get_running_loop().time
        began, pause, successes = now(), FIRST_PAUSE_S, self._successes
        limit, self.is_on = (LIMIT_S, True) if controls else (DOUBT_S, False)
        self._announce(problem, limit)
        try:
            for turn in itertools.count():
                if not (jobs := self._needed()):
                    return
                tested = jobs[turn % len(jobs)]  # each may be the cause of its own failure
                with WAITS.of(self._name, "the end of an outage"):
                    await asyncio.sleep(pause)
                    *again, answer = await self._answers([*controls, tested.item])
                pause, seconds = min(2 * pause, LONGEST_PAUSE_S), now() - began
                if succeeded := self._problem(answer) is None:
                    self.control = tested.item
                is_settled = (succeeded or not controls) and self._settled(tested, answer) is None
                if is_settled or None in map(self._problem, again):
                    return warn(f"{self._name}: works again after {seconds:.1f} s; {len(jobs)} failed jobs run again")
                if seconds > limit and (self.is_on or self.control is None):
                    raise RunError(
                        f"{self._name}: jobs have failed for {seconds:.0f} s; the last failure: {problem.message};"
                        " restore what the jobs need, and resume the run"
                    )
                if seconds > limit and len(jobs) < max(MANY, self._successes - successes):
                    return self._of_jobs.add(problem.kind)
                if seconds > limit:
                    limit, self.is_on = LIMIT_S, True
                    self._announce(problem, limit)
                echo(f"{self._name}: down for {seconds:.0f} s; the next attempt is in {pause:g} s", sys.stderr)
        finally:
            self.is_on = False
            self._seconds += now() - began

    def _announce(self, problem: Problem, limit: float) -> None:
        what = (
            "something that its jobs need is down. The run waits for it and draws no prompts meanwhile"
            if self.is_on
            else "a service that a job needs fails, and no job has succeeded yet. Failed jobs are repeated"
            if self.control is None
            else "a job fails again, but one that had succeeded does not. It is repeated, and the other jobs continue"
        )
        warn(f"{self._name}: {what}, for up to {limit:g} s ({problem.kind}: {problem.message})")
