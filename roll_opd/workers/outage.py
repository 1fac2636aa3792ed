"""Distinguish failures that jobs cause from an outage of a service that jobs need.

If a job of a pool fails, its failure is held back, and the last job that succeeded runs again, as a control. If the
control succeeds, the failed job runs again, and its second answer is final. If the control fails, something that the
jobs need is down. Then no further job is sent. The control and the oldest held job run again, after increasing pauses,
until one of them succeeds. After `LIMIT_S` the run ends.

So an outage costs time, and no job: the second failure of a job comes after a control that began after the first one.
Before any job has succeeded, there is no control, and a failure is final.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from roll_opd.base.failures import RunError
from roll_opd.base.terminal import echo, warn
from roll_opd.cluster.waits import WAITS

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0  # pauses between two attempts; they double
LIMIT_S = 600.0  # an outage of this length ends the run


class HeldJob(Protocol):
    """A job of a pool."""

    item: Any
    result: "asyncio.Future[Any]"

    def fail(self, error: BaseException) -> None:
        """Let the job fail."""


Job = TypeVar("Job", bound=HeldJob)


class Outage(Generic[Job]):
    """The failed jobs that a pool holds back, and whether an outage is in progress.

    All methods must be called from one event loop.
    """

    def __init__(
        self,
        name: str,
        attempt: Callable[[Any], Coroutine[Any, Any, Any]],
        problem: Callable[[Any], str | None],
        settle: Callable[[Job, Any], None],
        end: Callable[[RunError], None],
    ) -> None:
        """Create an outage that is not in progress.

        Args:
            name: name of the pool in messages.
            attempt: runs an item and returns its answer.
            problem: returns the text of the failure that an answer states, or None for a success.
            settle: gives a job its answer.
            end: lets all jobs that are not held fail with an error.
        """
        self._name, self._attempt, self._problem = name, attempt, problem
        self._settle, self._end = settle, end
        self.control: Any = None  # item of the last job that succeeded
        self.is_on = False
        self._held: list[Job] = []
        self._is_testing = False
        self._seconds = 0.0

    def hold(self, failed: Job) -> bool:
        """Hold a failed job back, and return whether `test` must be started."""
        self._held.append(failed)
        must_start, self._is_testing = not self._is_testing, True
        return must_start

    def drain_seconds(self) -> float:
        """Return the seconds of outages that have ended since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def test(self) -> None:
        """Decide about the held jobs, until none is left."""
        try:
            while jobs := self._needed():
                (answer,) = await self._answers([self.control])
                if (problem := self._problem(answer)) is not None:
                    await self._wait(problem)
                    continue
                for job, answer in zip(jobs, await self._answers([job.item for job in jobs]), strict=True):
                    self._held.remove(job)
                    self._settle(job, answer)
        finally:
            self._is_testing = False

    def _needed(self) -> list[Job]:
        self._held = [job for job in self._held if not job.result.done()]
        return list(self._held)

    async def _answers(self, items: Sequence[Any]) -> list[Any]:
        return await asyncio.gather(*map(self._attempt, items))

    async def _wait(self, problem: str) -> None:
        """Wait for the end of an outage. If it exceeds `LIMIT_S`, all jobs fail."""
        self.is_on, began, pause = True, time.monotonic(), FIRST_PAUSE_S
        warn(
            f"{self._name}: a job that had succeeded fails now, so something that it needs is down ({problem})\nThe run"
            f" waits up to {LIMIT_S:g} s for it and draws no prompts meanwhile. Then the failed jobs run again"
        )
        try:
            while jobs := self._needed():
                with WAITS.of(self._name, "the end of an outage"):
                    await asyncio.sleep(pause)
                    again, answer = await self._answers([self.control, jobs[0].item])
                pause, seconds = min(2 * pause, LONGEST_PAUSE_S), time.monotonic() - began
                if self._problem(answer) is None:
                    self.control = jobs[0].item
                    self._held.remove(jobs[0])
                    self._settle(jobs[0], answer)
                if None in (self._problem(again), self._problem(answer)):
                    return warn(f"{self._name}: works again after {seconds:.1f} s; {len(jobs)} failed jobs run again")
                if seconds > LIMIT_S:
                    return self._give_up(seconds, problem)
                echo(f"{self._name}: down for {seconds:.0f} s; the next attempt is in {pause:g} s", sys.stderr)
        finally:
            self.is_on = False
            self._seconds += time.monotonic() - began

    def _give_up(self, seconds: float, problem: str) -> None:
        error = RunError(
            f"{self._name}: every job has failed for {seconds:.0f} s, also one that had succeeded; the last failure:"
            f" {problem}; restore what the jobs need, and resume the run"
        )
        self._end(error)
        for job in self._held:
            job.fail(error)
