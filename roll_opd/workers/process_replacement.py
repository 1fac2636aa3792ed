"""Replace the lost processes of a role while the run continues.

Ray starts a lost process again under the same handle. `Renewal` ends the other processes of the same unit (all ranks of
a Megatron role, or one engine), waits until Ray has started all of them again, and sets them up as at the start of the
run.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import ray

from roll_opd.base.failures import RunError
from roll_opd.cluster.lost_processes import MAX_DEATHS, ClusterError, Loss, Losses
from roll_opd.cluster.stall_watchdog import WAITS
from roll_opd.cluster.startup_progress import StartupProgress
from roll_opd.workers.liveness import LIVES, beat_of, starts_of

POLL_S = 0.2
RETRY_S = 5.0  # seconds after a failed start

T = TypeVar("T")


async def started(what: str, start: Callable[[], Awaitable[None]], starting: StartupProgress) -> None:
    """Call `start`, at most `MAX_DEATHS` times until it succeeds. Raises RunError if it does not.

    Args:
        what: description of what starts, in messages.
        starting: limits the time of each attempt.
    """
    for attempt in range(1, MAX_DEATHS + 1):
        try:
            with WAITS.of("the run", what):
                await starting.of(what, start())
            starting.parts.pop(what, None)  # no part of the start of the run
            return
        except ClusterError as error:
            if attempt == MAX_DEATHS:
                raise RunError(f"{what} failed to start {MAX_DEATHS} times: {error}") from error
            await asyncio.sleep(RETRY_S)  # the former process may still hold device memory


async def attended(work: Awaitable[T], returned: asyncio.Event, act: Callable[[], Awaitable[None]]) -> T:
    """Return the result of `work`; meanwhile, call `act` each time that a replaced process has `returned`."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(returned.wait())
    try:
        while not (await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED))[0] >= {working}:
            returned.clear()
            await act()
            waiting = asyncio.ensure_future(returned.wait())
        return working.result()
    finally:
        waiting.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


class Renewal:
    """Starts the processes of one unit again after one of them was lost.

    `life` counts the renewals, so a caller can find out whether a process still has the state that it was given.
    """

    def __init__(
        self,
        role: str,
        what: str,
        handles: list[Any],
        setup: Callable[[], Awaitable[Any]],
        losses: Losses,
        starting: StartupProgress,
    ) -> None:
        """Create the renewal of running processes.

        Args:
            role: name of the role, for the limit.
            what: description of the unit in messages.
            handles: the processes.
            setup: sets up the processes, as at the start of the run.
            losses: record of the losses.
            starting: limits the time of a start.
        """
        self.life = 0
        self.what, self._role, self._handles, self._setup = what, role, handles, setup
        self._losses, self._starting = losses, starting
        self._running: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.done: Callable[[], None] = lambda: None  # called after each renewal
        for handle in handles:
            if handle in LIVES:
                LIVES[handle].lost = self._hear
                LIVES[handle].is_set_up()

    @property
    def is_up(self) -> bool:
        """Whether the processes are set up, as far as the driver knows."""
        return self._running is None

    def begin(self, why: str, *, is_loss: bool = True) -> "asyncio.Task[None]":
        """Start the renewal, if it is not running. Return its task. `is_loss`: it counts for the limit of losses."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._renew(why, is_loss))
            self._running.add_done_callback(self._ended)
        return self._running

    async def since(self, life: int, why: str, *, is_loss: bool = True) -> None:
        """Return when the processes have been renewed after the loss of a process of `life`."""
        if self.life == life:
            await asyncio.shield(self.begin(why, is_loss=is_loss))

    def end(self) -> None:
        """Stop a running renewal."""
        if self._running:
            self._running.cancel()

    def _hear(self, message: str) -> None:
        """Start the renewal from another thread."""

        def begin() -> None:
            if any(LIVES[handle].reported > LIVES[handle].restarts for handle in self._handles if handle in LIVES):
                self.begin(message)

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(begin)

    async def _renew(self, why: str, is_loss: bool) -> None:
        began = time.monotonic()
        phase = self._losses.add(self._role, why) if is_loss else self._losses.phase()

        async def start() -> None:
            await started_again(self._handles)
            await self._setup()

        await started(f"new processes of {self.what}", start, self._starting)
        for handle in self._handles:
            LIVES[handle].is_set_up()
        self.life += 1
        self._losses.record(Loss(self.what, why, phase, time.monotonic() - began, "replaced"))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            return
        if error := task.exception():  # `_running` stays: no call may reach these processes again
            assert isinstance(error, Exception)
            self._losses.fail(error)
            return
        self._running = None
        self.done()


async def started_again(handles: list[Any]) -> None:
    """Let Ray start the processes of actors again, and return when all have started.

    Processes that Ray has started again since the last call are kept, because nothing was set up in them.
    """
    known = {handle: LIVES[handle].restarts for handle in handles}
    for handle, (_, restarts, _) in (await asyncio.to_thread(starts_of, handles)).items():
        if restarts == known[handle]:
            ray.kill(handle, no_restart=False)
    while True:
        found = await asyncio.to_thread(starts_of, handles)
        if len(found) == len(handles) and all(
            state == "ALIVE" and restarts > known[handle] for handle, (state, restarts, _) in found.items()
        ):
            break
        await asyncio.sleep(POLL_S)
    for handle, (_, restarts, _) in found.items():
        LIVES[handle].start(restarts, await asyncio.to_thread(beat_of, handle))
