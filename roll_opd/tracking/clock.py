"""Wall time of a step by phase, measured in the driver.

Phases are exclusive: they and "other" sum to the step. Overlapping time belongs to the phase opened first: teacher
log-probs computed during generation count only after its end, and generation inside a validation is validation.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PHASES = ("generate", "teacher", "old_logprobs", "values", "reward", "train", "weight_sync", "validate", "checkpoint")


@dataclass(frozen=True)
class Moment:
    """Reading of the clock: finished laps, seconds of the current lap, current phase and its seconds."""

    laps: int
    lap_seconds: float
    phase: str | None
    phase_seconds: float


class PhaseClock:
    """Sums seconds by phase; `lap` reads and resets. Phases may nest, overlap, and run in several threads."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, began: float | None = None) -> None:
        """`began` is the start time of the first lap, by `now`; default: the current time."""
        self._now = now
        self._lock = threading.Lock()
        self._open: list[tuple[object, str, float]] = []  # oldest first: identity, name, start time
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._laps = 0
        self._settled = now()
        self._lap_began = self._settled if began is None else began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block under `name`, one of `PHASES` (else `ValueError`)."""
        if name not in self._seconds:
            raise ValueError(f"unknown phase {name!r}; known are {', '.join(PHASES)}")
        entry = (object(), name, self._now())
        with self._lock:
            self._settle()
            self._open.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._settle()
                self._open.remove(entry)

    def lap(self) -> dict[str, float]:
        """Return the seconds by phase of this lap, with `other` (the rest) and `step` (the sum); start a new lap."""
        with self._lock:
            self._settle()
            step = self._settled - self._lap_began
            seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
            self._lap_began = self._settled
            self._laps += 1
        return {**seconds, "other": max(0.0, step - sum(seconds.values())), "step": step}

    def moment(self) -> Moment:
        """Return the current reading."""
        with self._lock:
            now = self._now()
            _, phase, began = self._open[0] if self._open else (None, None, now)
            return Moment(self._laps, now - self._lap_began, phase, now - began)

    def _settle(self) -> None:
        """Add the time since the last change to the phase that was opened first."""
        now = self._now()
        if self._open:
            self._seconds[self._open[0][1]] += now - self._settled
        self._settled = now


def time_metrics(lap: dict[str, float]) -> dict[str, float]:
    """Return a lap as metrics: `time/<phase>` and `time/step`, in seconds."""
    return {f"time/{name}": seconds for name, seconds in lap.items()}
