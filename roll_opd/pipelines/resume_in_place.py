"""Continue a run in the same process after the loss of a process that cannot be replaced on its own.

This is a process of a model that is trained or follows the student, or of a role that shares devices. These models
start again, and the run continues after its newest checkpoint. Engines and teachers on other devices continue to run.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from roll_opd.base.command_line import SESSION_SOCKET
from roll_opd.cluster.lost_processes import MAX_DEATHS, Loss, ProcessDied
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.workers.liveness import LIVES
from roll_opd.workers.process_replacement import started


class Revival:
    """Runs the loop of a pipeline, and starts it again after losses."""

    def __init__(self, run: Run) -> None:
        self._run, self._loop = run, asyncio.get_running_loop()
        self._failed = self._new_failure()
        self._fatal: Exception | None = None  # no new start remedies it
        self._phase: str | None = None  # in which the failure was reported
        self._in_vain, self._furthest = 0, -1
        run.placement.losses.fail = self._fail

    async def trained(self, train: Callable[[Run, RunWorkers], Awaitable[None]], workers: RunWorkers) -> None:
        """Call `train` until it has reached the last step.

        Raises ProcessDied if the loop has made no progress between several losses, or is that of a session.
        """
        while True:
            for life in LIVES.values():
                if life.lost is None and SESSION_SOCKET not in os.environ:
                    life.lost = self._lose
            try:
                await self._or_failure(train(self._run, workers))
                return
            except ProcessDied as died:
                if SESSION_SOCKET in os.environ:  # its client holds state that cannot be rewound
                    raise
                await self._start_again(died, workers)

    async def _start_again(self, died: ProcessDied, workers: RunWorkers) -> None:
        run, began, reached = self._run, time.monotonic(), self._run.logger.steps_done
        self._in_vain = 0 if reached > self._furthest else self._in_vain + 1
        self._furthest = max(self._furthest, reached)
        if self._in_vain == MAX_DEATHS - 1:
            raise died
        phase = run.placement.losses.add("the trained models", str(died)) or self._phase
        run.logger.note(f"{died}; the trained models start again")
        await started("the trained models", workers.start_again, run.placement.starting)
        if self._fatal:
            raise self._fatal
        self._failed = self._new_failure()  # without the losses that the start itself has made
        self._run = run.rewound()
        done = self._run.steps_done
        remedy = f"started again after step {done}, so {reached - done} steps are repeated"
        run.placement.losses.record(Loss("the trained models", str(died), phase, time.monotonic() - began, remedy))

    async def _or_failure(self, work: Awaitable[None]) -> None:
        """Await `work`, unless a process is lost for which nothing waits, or losses must end the run."""
        working, failed = asyncio.ensure_future(work), self._failed
        try:
            await asyncio.wait({working, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
        if not working.cancelled():
            working.result()
        else:
            failed.result()

    def _new_failure(self) -> "asyncio.Future[None]":
        """Return a future that raises the error that ends the loop."""
        failure: asyncio.Future[None] = self._loop.create_future()
        failure.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the loop may fail first
        return failure

    def _lose(self, message: str) -> None:
        def fail() -> None:
            if any(life.reported > life.restarts for life in LIVES.values()):  # else it has started again meanwhile
                self._fail(ProcessDied(message))

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(fail)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, ProcessDied):
            self._fatal = error
        if not self._failed.done():
            self._phase = self._run.placement.losses.phase()
            self._failed.set_exception(error)
