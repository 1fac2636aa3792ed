"""Run a tracker in a separate thread, so that one that raises, hangs or starts slowly does not delay training.

Rows wait in a bounded queue. A call that raises is retried, then the tracker is dropped. A call that does not return
causes a warning; the tracker is dropped when the queue is full. A tracker causes at most two warnings: slow, dropped.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roll_opd.base.full_disk import reason
from roll_opd.base.terminal import warn
from roll_opd.tracking.registry import Tracker

FAILURES = (Exception, SystemExit)  # SystemExit in a library would end the thread silently


@dataclass(frozen=True)
class TrackerTimeouts:
    """Timeouts of a tracker in seconds, and the size of its queue."""

    opening: float = 20.0
    silence: float = 60.0  # duration of one call before a warning
    closing: float = 30.0
    retries: tuple[float, ...] = (1.0, 5.0)  # delays before retries of a call that raised
    rows: int = 1000


class BackgroundTracker:
    """Queue and thread of the tracker made by `make`. No method raises; only `ready` and `join` block."""

    def __init__(self, name: str, make: Callable[[], Tracker], timeouts: TrackerTimeouts) -> None:
        self._name, self._make, self._timeouts = name, make, timeouts
        self._rows: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(timeouts.rows)
        self._opened = threading.Event()
        self._ended = threading.Event()  # closed or dropped
        self._lock = threading.Lock()
        self._slow = False  # the warning has been printed
        self._busy_since: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether the tracker is neither closed nor dropped."""
        return not self._ended.is_set()

    def ready(self, timeout: float) -> None:
        """Wait until the tracker is open or has failed; print a warning after `timeout` seconds."""
        if not self._opened.wait(timeout) and self.works:
            self._warn_slow(f"has not started after {timeout:.0f} s; steps are queued")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Put the metrics of `step` into the queue."""
        if not self.works:
            return
        began = self._busy_since
        if began is not None and time.monotonic() - began > self._timeouts.silence:
            self._warn_slow(
                f"has not responded for {self._timeouts.silence:.0f} s at step {step}; up to {self._timeouts.rows}"
                " steps are queued, then the tracker is dropped"
            )
        try:
            self._rows.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._drop(f"does not respond and is dropped at step {step}")

    def finish(self) -> None:
        """Request to flush the queue and close the tracker; `join` waits for it."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            self._drop("does not respond and is dropped at the end of the run")

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the tracker to close."""
        if self.works and not self._ended.wait(timeout):
            self._drop(f"was not closed {self._timeouts.closing:.0f} s after the last step")

    def _work(self) -> None:
        try:
            tracker = self._make()
        except FAILURES as error:
            self._drop(f"could not be opened: {reason(error)}")
            self._opened.set()
            return
        self._opened.set()
        while True:
            self._busy_since = None
            row = self._rows.get()
            self._busy_since = time.monotonic()
            if not self.works:
                return
            if row is None:
                break
            if not self._deliver(tracker, *row):
                return
        try:
            tracker.close()
        except FAILURES as error:
            self._drop(f"could not be closed: {reason(error)}")
        self._ended.set()

    def _deliver(self, tracker: Tracker, step: int, metrics: Mapping[str, float]) -> bool:
        for wait in (*self._timeouts.retries, None):
            try:
                tracker.log(step, metrics)
                return True
            except FAILURES as error:
                if wait is None:
                    self._drop(f"failed at step {step} and is dropped: {reason(error)}")
                    return False
            if self._ended.wait(wait):
                return False
        return False

    def _drop(self, what: str) -> None:
        with self._lock:
            if self.works:
                self._warn(f"{what}; the run continues without it, and metrics.jsonl has every step")
                self._ended.set()  # after the warning, so that it is printed before `join` returns

    def _warn_slow(self, what: str) -> None:
        with self._lock:
            if self.works and not self._slow:
                self._slow = True
                self._warn(what)

    def _warn(self, what: str) -> None:
        warn(f"tracker {self._name} {what}")
