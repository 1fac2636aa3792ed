"""Where the metrics of a step go: `metrics.jsonl` always, and the trackers that the configuration names.

A tracker is a bystander: one that fails prints one warning and is dropped, and the run goes on.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from roll_opd.tracking.run_directory import METRICS, RunDirectory


class Tracker(Protocol):
    """What receives the metrics of every step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """`metrics.jsonl`: one object a call, `step` first, the same names as everywhere."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.append_jsonl(METRICS, [{"step": step, **metrics}])

    def close(self) -> None:
        pass


class StdoutTracker:
    """Every metric of a step as one line of text."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = " ".join(f"{name}={value:.6g}" for name, value in sorted(metrics.items()))
        print(f"step={step} {numbers}", flush=True)

    def close(self) -> None:
        pass


class TensorBoardTracker:
    """TensorBoard event files; after a resume the events of later steps are purged from view."""

    def __init__(self, directory: str | Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(log_dir=str(directory), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()  # a killed run keeps what it has logged

    def close(self) -> None:
        self._writer.close()


# (run, directory the configuration gives it or None, step resumed from or None) -> tracker
TrackerFactory = Callable[[RunDirectory, str | None, int | None], Tracker]

TRACKERS: dict[str, TrackerFactory] = {
    "tensorboard": lambda run, directory, resume_step: TensorBoardTracker(directory or run.tensorboard, resume_step),
    "stdout": lambda run, directory, resume_step: StdoutTracker(),
    "jsonl": lambda run, directory, resume_step: JsonlTracker(run),
}


class Trackers:
    """The trackers of a run as one."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    @classmethod
    def open(
        cls,
        names: Iterable[str],
        run: RunDirectory,
        resume_step: int | None = None,
        directories: Mapping[str, Any] | None = None,
    ) -> "Trackers":
        """Open `jsonl` and the trackers in `names`; `directories` gives some of them a place of their own.

        `resume_step` is the last step of a run that goes on. Raises `ValueError` for a name not in
        `TRACKERS`; a tracker that cannot be opened (a package is missing, a disk is full) is left out with a
        warning.
        """
        wanted = dict.fromkeys(("jsonl", *names))
        unknown = [name for name in wanted if name not in TRACKERS]
        if unknown:
            raise ValueError(f"unknown trackers {', '.join(unknown)}; known are {', '.join(sorted(TRACKERS))}")
        opened: dict[str, Tracker] = {}
        for name in wanted:
            try:
                opened[name] = TRACKERS[name](run, (directories or {}).get(name), resume_step)
            except Exception as error:  # a tracker never stops a run
                _warn(name, "could not be opened", error)
        return cls(opened)

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that still work."""
        return tuple(self._trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the metrics of `step` to every tracker."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, metrics)
            except Exception as error:  # a tracker never stops a run
                _warn(name, f"failed at step {step} and is dropped", error)
                del self._trackers[name]

    def close(self) -> None:
        """Close every tracker; calling it twice does no harm."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:  # a tracker never stops a run
                _warn(name, "could not be closed", error)
        self._trackers = {}


def _warn(name: str, what: str, error: Exception) -> None:
    print(f"warning: tracker {name} {what}; the run goes on without it: {error!r}", file=sys.stderr, flush=True)
