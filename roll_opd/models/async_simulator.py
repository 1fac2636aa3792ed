"""Discrete-event simulation of a run's schedule: step time, idle shares and sample ages from stated or measured costs.

The order of groups is that of the run itself (`models.group_window`). Engines sample runs (one response each) in a
fixed number of slots, in the order of admission; scoring, learning and weight sync of a batch happen in sequence.

Two laws bound the result. With disjoint devices a step takes at least max(generate, score + learn + sync), where
generate is the engines' work of a batch divided by their slots; without groups ahead it takes at least their sum. And
engines are busy for the share 1/τ, with τ = E[slowest of the runs submitted together] / E[run].
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from roll_opd.models.group_window import GroupWindow, Pace

Length = Callable[[random.Random], float]


@dataclass(frozen=True)
class Costs:
    """Seconds of each part of a step. `run`: draws the seconds of one run in a slot of an engine."""

    run: Length
    score: float
    learn: float
    sync: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """What a simulated run did. Times are in seconds, ages in versions."""

    step: float  # mean seconds of a step, without the first tenth of the run
    generate: float  # seconds of a batch's sampling if all slots are always busy
    engine_idle: float  # share of the slots' time
    learner_idle: float  # share of the time in which the learner waits for a batch
    ages: tuple[int, ...] = field(repr=False)  # of each trained group, at its admission
    trained: tuple[int, ...] = field(repr=False)  # numbers of the groups, in the order of training

    @property
    def mean_age(self) -> float:
        return fmean(self.ages)


def lognormal(mean: float, spread: float) -> Length:
    """Return a long-tailed length: lognormal of a mean and a standard deviation `spread` of its logarithm."""
    return lambda rng: mean * rng.lognormvariate(-spread * spread / 2, spread)


def constant(seconds: float) -> Length:
    """Return the length of runs that all take `seconds`."""
    return lambda rng: seconds


def simulate(pace: Pace, costs: Costs, *, runs: int, slots: int, batches: int, seed: int = 0) -> Schedule:
    """Return the schedule of `batches` batches with `runs` runs a group on `slots` slots of the engines."""
    return _Simulation(pace, costs, runs, slots, batches, seed).schedule()


class _Simulation:
    """Events by time. One clock; engines and learner act when an event frees them."""

    def __init__(self, pace: Pace, costs: Costs, runs: int, slots: int, batches: int, seed: int) -> None:
        self._window = GroupWindow(pace, 0, batches)
        self._costs, self._runs, self._slots, self._rng = costs, runs, slots, random.Random(seed)
        self._now, self._count = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # (time, number, action)
        self._waiting: deque[int] = deque()  # runs without a slot, by group
        self._left: dict[int, int] = {}  # unfinished runs of a group
        self._admitted_at: dict[int, int] = {}
        self._free, self._is_learning = slots, False
        self._work, self._learner_busy = 0.0, 0.0
        self._ends: list[float] = []
        self._ages: list[int] = []
        self._trained: list[int] = []

    def schedule(self) -> Schedule:
        self._advance()
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
            self._advance()
        warm = len(self._ends) // 10
        step = (self._ends[-1] - self._ends[warm]) / (len(self._ends) - warm - 1) if len(self._ends) > 1 else self._now
        per_batch = self._work / len(self._ends) / self._slots
        return Schedule(
            step,
            per_batch,
            1 - self._work / (self._slots * self._now),
            1 - self._learner_busy / self._now,
            tuple(self._ages),
            tuple(self._trained),
        )

    def _advance(self) -> None:
        """Admit groups, fill free slots, and begin learning, as far as the state permits."""
        for number in self._window.admit(self._window.room):
            self._left[number], self._admitted_at[number] = self._runs, self._window.version
            self._waiting.extend([number] * self._runs)
        while self._waiting and self._free:
            self._begin_run(self._waiting.popleft())
        if not self._is_learning and not self._window.is_complete and (batch := self._window.take()):
            self._begin_learning(batch)

    def _begin_run(self, group: int) -> None:
        seconds = self._costs.run(self._rng)
        self._free -= 1
        self._work += seconds

        def end() -> None:
            self._free += 1
            self._left[group] -= 1
            if not self._left[group]:
                self._window.decide(group, passed=True)

        self._after(seconds, end)

    def _begin_learning(self, batch: list[int]) -> None:
        version = self._window.batches - 1
        self._ages += [version - self._admitted_at[number] for number in batch]
        self._trained += batch
        seconds = self._costs.score + self._costs.learn + self._costs.sync
        self._is_learning = True
        self._learner_busy += seconds

        def end() -> None:
            self._is_learning = False
            self._ends.append(self._now)
            self._window.publish(version + 1)

        self._after(seconds, end)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._count += 1  # first scheduled, first served
        heapq.heappush(self._events, (self._now + seconds, self._count, act))
