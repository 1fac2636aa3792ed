"""Wall time of each phase of a step, measured in the driver.

Phases of one track are exclusive: if they overlap, the time counts for the phase that was opened first. For example,
teacher log-probs may be computed during generation. This time counts as generation until generation ends. In the same
way, generation inside a validation counts as validation.

A task may open a separate track for itself and for the tasks that it starts. Phases of different tracks are counted
independently. The time in which no phase is open is reported as "other". If no phases of different tracks are open at
the same time, the phases and "other" sum to the time of the step.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

PHASES = ("generate", "teacher", "old_logprobs", "values", "reward", "train", "weight_sync", "validate", "checkpoint")
_TRACK: ContextVar[str] = ContextVar("track", default="main")


@dataclass(frozen=True)
class Moment:
    """A reading of the clock. `laps` is the number of finished laps, and `lap_seconds` is the time of the current lap.

    `phase` is the phase that was opened first, or None if no phase is open. `phase_seconds` is the time since then.
    """

    laps: int
    lap_seconds: float
    phase: str | None
    phase_seconds: float


@dataclass(frozen=True, eq=False)
class _Phase:
    name: str
    track: str
    began: float


class PhaseClock:
    """Sums the seconds of each phase. `lap` returns the sums and resets them.

    Phases may nest, overlap, and run in several tasks and threads.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, began: float | None = None) -> None:
        """Start the clock.

        Args:
            now: returns the current time in seconds.
            began: start time of the first lap, as a value of `now()`. The default is the current time.
        """
        self._now = now
        self._lock = threading.Lock()
        self._open: list[_Phase] = []  # oldest first
        self._failed: str | None = None  # the phase that an exception has left, until the next phase
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._covered = 0.0  # seconds of the lap in which a phase was open
        self._laps = 0
        self._settled = now()
        self._lap_began = self._settled if began is None else began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block as this phase. Raises ValueError if the name is not in `PHASES`."""
        if name not in self._seconds:
            raise ValueError(f"unknown phase {name!r}; known are {', '.join(PHASES)}")
        entry = _Phase(name, _TRACK.get(), self._now())
        with self._lock:
            self._settle()
            self._open.append(entry)
            self._failed = None
        try:
            yield
        except Exception:
            self._failed = self._failed or name
            raise
        finally:
            with self._lock:
                self._settle()
                self._open.remove(entry)

    @contextmanager
    def track(self, name: str) -> Iterator[None]:
        """Use this track for phases inside the `with` block.

        The track also applies to tasks that are started inside the block. Its phases are counted independently of the
        phases of other tracks.
        """
        before = _TRACK.set(name)
        try:
            yield
        finally:
            _TRACK.reset(before)

    def lap(self) -> dict[str, float]:
        """Return a map from each phase to its seconds in this lap, and start a new lap.

        The map also has `other`, the seconds without an open phase, and `step`, the seconds of the whole lap.
        """
        with self._lock:
            self._settle()
            step = self._settled - self._lap_began
            seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
            covered, self._covered = self._covered, 0.0
            self._lap_began = self._settled
            self._laps += 1
        return {**seconds, "other": max(0.0, step - covered), "step": step}

    def moment(self) -> Moment:
        """Return the current reading of the clock."""
        with self._lock:
            now = self._now()
            oldest = self._open[0] if self._open else None
            phase, seconds = (oldest.name, now - oldest.began) if oldest else (None, 0.0)
            return Moment(self._laps, now - self._lap_began, phase, seconds)

    def phase_of_failure(self) -> str | None:
        """Return the phase that was opened first; if none is open, the one that an exception left since."""
        return self.moment().phase or self._failed

    def _settle(self) -> None:
        """Add the time since the last change to the oldest open phase of each track."""
        now = self._now()
        first = {phase.track: phase.name for phase in reversed(self._open)}
        for name in first.values():
            self._seconds[name] += now - self._settled
        self._covered += now - self._settled if first else 0.0
        self._settled = now


def time_metrics(lap: dict[str, float]) -> dict[str, float]:
    """Return the times of a lap as metrics `time/<phase>` and `time/step`, in seconds."""
    return {f"time/{name}": seconds for name, seconds in lap.items()}
