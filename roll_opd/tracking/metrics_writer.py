"""Write the metrics of every step to `metrics.jsonl` and to the trackers of a run.

`metrics.jsonl` is written synchronously. Every tracker runs in a background thread, so that a hanging tracker does not
stop training.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from roll_opd.base.failures import reason
from roll_opd.base.terminal import warn
from roll_opd.tracking.run_directory import METRICS, RunDirectory
from roll_opd.tracking.tracker_registry import JSONL, Tracker, find

FAILURES = (Exception, SystemExit)  # a SystemExit raised in a library would end the thread silently


@dataclass(frozen=True)
class TrackerTimeouts:
    """Timeouts of a tracker in seconds, and the size of its queue."""

    opening: float = 20.0
    silence: float = 60.0  # duration of one call before a warning
    closing: float = 30.0
    retries: tuple[float, ...] = (1.0, 5.0)  # delays before retries of a call that has raised an error
    rows: int = 1000


class BackgroundTracker:
    """Runs a tracker in a background thread with a queue of metrics.

    The thread creates the tracker by calling `make`. No method raises an error. Only `ready` and `join` block.
    """

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
        """Whether the tracker has been neither closed nor dropped."""
        return not self._ended.is_set()

    def ready(self, timeout: float) -> None:
        """Wait until the tracker is open or has failed. Print a warning if this takes longer than `timeout` seconds."""
        if not self._opened.wait(timeout) and self.works:
            self._warn_slow(f"has not started after {timeout:.0f} s; steps are queued")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Put the metrics of `step` into the queue. If the queue is full, the tracker is dropped."""
        if not self.works:
            return
        began = self._busy_since
        if began is not None and time.monotonic() - began > self._timeouts.silence:
            self._warn_slow(
                f"has not responded for {self._timeouts.silence:.0f} s at step {step}; the tracker is dropped when"
                f" {self._timeouts.rows} steps are queued"
            )
        try:
            self._rows.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._drop(f"does not respond and is dropped at step {step}")

    def finish(self) -> None:
        """Request that the thread writes all queued metrics and then closes the tracker.

        This method does not wait. `join` waits for the thread.
        """
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            self._drop("does not respond and is dropped at the end of the run")

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until the tracker is closed. After a timeout, the tracker is dropped."""
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
                self._ended.set()  # set after the warning, so that the warning is printed before `join` returns

    def _warn_slow(self, what: str) -> None:
        with self._lock:
            if self.works and not self._slow:
                self._slow = True
                self._warn(what)

    def _warn(self, what: str) -> None:
        warn(f"tracker {self._name} {what}")


class MetricsWriter:
    """Writes each row of metrics to `metrics.jsonl` and to the trackers of a run."""

    def __init__(self, run: RunDirectory, trackers: Mapping[str, BackgroundTracker], timeouts: TrackerTimeouts) -> None:
        self._run, self._trackers, self._timeouts = run, dict(trackers), timeouts
        self._jsonl_failed = False
        self._kept: list[tuple[int, Mapping[str, float]]] | None = None  # rows between `hold` and `release`
        self._again: Callable[..., MetricsWriter]  # opens the same trackers

    @classmethod
    def open(
        cls,
        names: Iterable[str],
        run: RunDirectory,
        resume_step: int | None = None,
        args: Mapping[str, Mapping[str, Any]] | None = None,
        timeouts: TrackerTimeouts | None = None,
    ) -> "MetricsWriter":
        """Open several trackers concurrently.

        Raises `TrackerError` for an unknown name. If a tracker cannot be opened, for example because a service is down,
        it is dropped and a warning is printed.

        Args:
            names: names of the trackers, as in `track_with`.
            run: directory of the run.
            resume_step: step of the checkpoint from which the run is resumed, or None for a new run.
            args: keyword arguments of each tracker, by name.
            timeouts: timeouts of each tracker. None means the defaults.
        """
        timeouts = timeouts or TrackerTimeouts()
        factories = {name: find(name) for name in dict.fromkeys(names) if name != JSONL}
        trackers = {
            name: BackgroundTracker(name, partial(factory, run, resume_step, **(args or {}).get(name, {})), timeouts)
            for name, factory in factories.items()
        }
        deadline = time.monotonic() + timeouts.opening
        for tracker in trackers.values():
            tracker.ready(max(0.0, deadline - time.monotonic()))
        made = cls(run, trackers, timeouts)
        made._again = partial(cls.open, tuple(names), run, args=args, timeouts=timeouts)
        return made

    def reopen(self, step: int) -> None:
        """Close all trackers, and open them again as those of a run that resumes after `step`."""
        self.close()
        self._trackers, self._kept = self._again(resume_step=step)._trackers, None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all trackers that are neither closed nor dropped, including `jsonl`."""
        return (JSONL, *(name for name, tracker in self._trackers.items() if tracker.works))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step` to `metrics.jsonl` and to every tracker."""
        if self._kept is not None:
            self._kept.append((step, metrics))
            return
        try:
            self._run.append_jsonl(METRICS, [{"step": step, **metrics}])
        except OSError as error:
            if not self._jsonl_failed:
                warn(f"{METRICS} cannot be written at step {step}: {reason(error)}; later steps will be retried")
            self._jsonl_failed = True
        for tracker in self._trackers.values():
            tracker.log(step, metrics)

    def hold(self) -> None:
        """Keep the rows of the next steps until `release`, because the first of them lacks metrics."""
        self._kept = []

    def release(self, metrics: Mapping[str, float]) -> None:
        """Write all kept rows, the first of them with `metrics` added."""
        kept, self._kept = self._kept or [], None
        for number, (step, row) in enumerate(kept):
            self.log(step, {**row, **metrics} if number == 0 else row)

    def close(self) -> None:
        """Flush and close every tracker within `TrackerTimeouts.closing` seconds. Further calls have no effect."""
        working = [tracker for tracker in self._trackers.values() if tracker.works]
        for tracker in working:
            tracker.finish()
        deadline = time.monotonic() + self._timeouts.closing
        for tracker in working:
            tracker.join(max(0.0, deadline - time.monotonic()))
