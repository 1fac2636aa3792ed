"""Record the open waits of the driver, and the time at which the run last made progress.

An open wait states which part waits, for what, and for how long. A wait is recorded for every call to a named actor. It
is also recorded if one of these four parts waits for another one: the producer, the learner, the scorer, and weight
sync. The start and the end of a wait count as progress. `watchdog` reports a run without progress.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 60.0  # seconds without progress before the open waits are reported
CHECKS = 20  # number of checks in this time
SHOWN = 12  # waits in a report


@dataclass(frozen=True, eq=False)
class _Wait:
    who: str
    whom: str
    began: float


class Waits:
    """The open waits of a process. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._open: dict[int, _Wait] = {}
        self._last = now()

    @contextmanager
    def of(self, who: str, whom: str) -> Iterator[None]:
        """Context manager: record that `who` waits for `whom`."""
        wait = _Wait(who, whom, self._now())
        with self._lock:
            self._open[id(wait)], self._last = wait, wait.began
        try:
            yield
        finally:
            with self._lock:
                del self._open[id(wait)]
                self._last = self._now()

    def moved(self) -> None:
        """Record progress other than the start or end of a wait, for example the arrival of an item of a stream."""
        self._last = self._now()

    def idle_seconds(self) -> float:
        """Return the seconds since the last progress; 0 if there is no open wait."""
        with self._lock:
            return self._now() - self._last if self._open else 0.0

    def text(self) -> str:
        """Return a description of the open waits, the longest wait first.

        Equal waits are shown as one wait with a count.
        """
        with self._lock:
            now, found = self._now(), list(self._open.values())
        lines: dict[str, tuple[int, float]] = {}
        for wait in found:
            line = f"{wait.who} waits for {wait.whom}"
            count, seconds = lines.get(line, (0, 0.0))
            lines[line] = count + 1, max(seconds, now - wait.began)
        longest = sorted(lines.items(), key=lambda item: -item[1][1])
        shown = [
            f"{line}{f' ({count} times)' if count > 1 else ''}, for {seconds:.0f} s"
            for line, (count, seconds) in longest[:SHOWN]
        ]
        return "; ".join(shown + ([f"and {len(longest) - SHOWN} more"] if len(longest) > SHOWN else []))


WAITS = Waits()  # of the driver


@contextmanager
def watchdog(
    report: Callable[[str], None],
    end: Callable[[str], None],
    limit: float | None = None,
    progress: Callable[[], Any] = lambda: None,
    is_on: Callable[[], bool] = lambda: True,
    waits: Waits = WAITS,
    patience: float = PATIENCE_S,
) -> Iterator[None]:
    """Context manager: a thread checks that the run makes progress.

    Args:
        report: called with the open waits after `patience` seconds without progress. If there is still no progress, it
            is called again at intervals that double.
        end: called once with the open waits after `limit` seconds without progress.
        progress: returns a value that changes while a long call makes progress.
        is_on: returns whether waits are counted. Waits do not count during the start and the end of a run, because
            these have separate time limits.
    """
    done = threading.Event()
    first = min(patience, limit or patience)

    def work() -> None:
        due, before, is_ended = first, progress(), False
        while not done.wait(first / CHECKS):
            if (now := progress()) != before or not is_on():
                before = now
                waits.moved()
            seconds = waits.idle_seconds()
            if seconds < first:
                due = first
            elif limit and seconds >= limit and not is_ended:
                is_ended = True
                end(f"nothing has moved for {seconds:.0f} s (stall_timeout_s): {waits.text()}")
            elif seconds >= due and not is_ended:
                due = 2 * seconds
                report(f"Nothing has moved for {seconds:.0f} s: {waits.text()}")

    thread = threading.Thread(target=work, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(1.0)
