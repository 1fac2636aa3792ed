"""Write the metrics of a step: to `metrics.jsonl` always, and to the trackers that the configuration names.

`metrics.jsonl` is written at once, by the run itself; every other tracker runs in the background.
"""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from roll_opd.base.full_disk import reason
from roll_opd.base.terminal import warn
from roll_opd.tracking.background import BackgroundTracker, Patience
from roll_opd.tracking.registry import find
from roll_opd.tracking.run_directory import METRICS, RunDirectory

JSONL = "jsonl"


class Trackers:
    """The trackers of a run as one."""

    def __init__(self, run: RunDirectory, trackers: Mapping[str, BackgroundTracker], patience: Patience) -> None:
        self._run, self._trackers, self._patience = run, dict(trackers), patience
        self._jsonl_failed = False

    @classmethod
    def open(
        cls,
        names: Iterable[str],
        run: RunDirectory,
        resume_step: int | None = None,
        args: Mapping[str, Mapping[str, Any]] | None = None,
        patience: Patience | None = None,
    ) -> "Trackers":
        """Open the trackers in `names`, each with its own of `args`, all at the same time.

        `resume_step` is the last step of a run that is resumed. Raises `TrackerError` for an unknown name; a tracker
        that cannot be opened (a disk is full, a service is down) is left out with a warning.
        """
        patience = patience or Patience()
        factories = {name: find(name) for name in dict.fromkeys(names) if name != JSONL}
        trackers = {
            name: BackgroundTracker(name, partial(factory, run, resume_step, **(args or {}).get(name, {})), patience)
            for name, factory in factories.items()
        }
        deadline = time.monotonic() + patience.opening
        for tracker in trackers.values():
            tracker.ready(max(0.0, deadline - time.monotonic()))
        return cls(run, trackers, patience)

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that still work."""
        return (JSONL, *(name for name, tracker in self._trackers.items() if tracker.works))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the metrics of `step` to every tracker."""
        try:
            self._run.append_jsonl(METRICS, [{"step": step, **metrics}])
        except OSError as error:
            if not self._jsonl_failed:
                warn(f"{METRICS} cannot be written at step {step}: {reason(error)}; later steps are tried again")
            self._jsonl_failed = True
        for tracker in self._trackers.values():
            tracker.log(step, metrics)

    def close(self) -> None:
        """Let every tracker write what it has, for at most `Patience.closing` seconds; twice does no harm."""
        working = [tracker for tracker in self._trackers.values() if tracker.works]
        for tracker in working:
            tracker.finish()
        deadline = time.monotonic() + self._patience.closing
        for tracker in working:
            tracker.join(max(0.0, deadline - time.monotonic()))
