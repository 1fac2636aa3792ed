"""A scheduler of asyncio that executes one external event at a time, in an order of its choice.

Parts outside of the driver (engines, teachers, rewards, the student) wait for their `turn`. When no task of the driver
can continue, the loop ends one of these waits. If there is none, the driver waits for ever, which raises `Deadlock`.
So a run has no real time, and a seed repeats its order of events.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from roll_opd.cluster.stall_watchdog import WAITS

OUTSIDE = "outside"  # name of tasks that belong to the parts outside of the driver


class Deadlock(AssertionError):
    """No part can continue. The message lists the waits of the driver."""


class LostPart(Exception):
    """An injected failure of a part."""


class ScriptedLoop(asyncio.SelectorEventLoop):
    """An event loop whose external events happen in a random order.

    Args:
        seed: chooses the order.
        interrupted_at: number of the event in whose place `interrupt` is called.
        interrupt: called with the loop and the future that waits for this event.
    """

    def __init__(
        self,
        seed: int,
        interrupted_at: int | None = None,
        interrupt: Callable[["ScriptedLoop", "asyncio.Future[None]"], Any] = lambda *_: None,
    ) -> None:
        super().__init__()
        self.rng, self.events = random.Random(seed), 0
        self.problems: list[dict[str, Any]] = []  # exceptions that no task has retrieved
        self.set_exception_handler(lambda _, context: self.problems.append(context))
        self.left: list[asyncio.Task[Any]] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._interrupted_at, self._interrupt = interrupted_at, interrupt
        self._draining = False

    def turn(self) -> "asyncio.Future[None]":
        """Return a future that ends when the loop chooses it."""
        self._waiting.append(self.create_future())
        return self._waiting[-1]

    def _run_once(self) -> None:
        if not (self._ready or self._scheduled or self._draining):
            self._choose()
        super()._run_once()

    def _choose(self) -> None:
        self._waiting = [event for event in self._waiting if not event.done()]
        if not self._waiting:
            raise Deadlock(f"after {self.events} events: {WAITS.text() or 'no part waits'}")
        event = self._waiting.pop(self.rng.randrange(len(self._waiting)))
        self.events += 1
        if self.events == self._interrupted_at:
            self._interrupt(self, event)
        if not event.done():
            event.set_result(None)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of `work`. `left` then has the tasks that have not ended, except those named `OUTSIDE`."""
        asyncio.set_event_loop(self)
        main = self.create_task(work)
        self.main = main
        try:
            return self.run_until_complete(main)
        finally:
            self._drain()
            self.left = [task for task in asyncio.all_tasks(self) if task.get_name() != OUTSIDE]
            for task in asyncio.all_tasks(self):
                task.cancel()
            self._drain()
            asyncio.set_event_loop(None)
            self.close()

    def _drain(self) -> None:
        """Execute the callbacks that need no further event. 20 rounds suffice for the driver's nested tasks."""
        self._draining = True
        for _ in range(20):
            self.run_until_complete(asyncio.sleep(0))
