"""Write the metrics of a step to `metrics.jsonl` and to the configured trackers.

`metrics.jsonl` is written synchronously; every other tracker runs in the background.
"""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from roll_opd.base.full_disk import reason
from roll_opd.base.terminal import warn
from roll_opd.tracking.background import BackgroundTracker, TrackerTimeouts
from roll_opd.tracking.registry import find
from roll_opd.tracking.run_directory import METRICS, RunDirectory

JSONL = "jsonl"


class Trackers:
    """All trackers of a run, and `metrics.jsonl`."""

    def __init__(self, run: RunDirectory, trackers: Mapping[str, BackgroundTracker], timeouts: TrackerTimeouts) -> None:
        self._run, self._trackers, self._timeouts = run, dict(trackers), timeouts
        self._jsonl_failed = False

    @classmethod
    def open(
        cls,
        names: Iterable[str],
        run: RunDirectory,
        resume_step: int | None = None,
        args: Mapping[str, Mapping[str, Any]] | None = None,
        timeouts: TrackerTimeouts | None = None,
    ) -> "Trackers":
        """Open the trackers in `names` concurrently, each with its entry of `args`.

        `resume_step` is the last step of a resumed run. Raises `TrackerError` for an unknown name; a tracker that
        cannot be opened (a disk is full, a service is down) is dropped with a warning.
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
        return cls(run, trackers, timeouts)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the working trackers."""
        return (JSONL, *(name for name, tracker in self._trackers.items() if tracker.works))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step` to every tracker."""
        try:
            self._run.append_jsonl(METRICS, [{"step": step, **metrics}])
        except OSError as error:
            if not self._jsonl_failed:
                warn(f"{METRICS} cannot be written at step {step}: {reason(error)}; later steps will be retried")
            self._jsonl_failed = True
        for tracker in self._trackers.values():
            tracker.log(step, metrics)

    def close(self) -> None:
        """Flush and close every tracker within `TrackerTimeouts.closing` seconds; further calls have no effect."""
        working = [tracker for tracker in self._trackers.values() if tracker.works]
        for tracker in working:
            tracker.finish()
        deadline = time.monotonic() + self._timeouts.closing
        for tracker in working:
            tracker.join(max(0.0, deadline - time.monotonic()))
