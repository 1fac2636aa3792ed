"""Discrete-event simulation of a run: step time, idle fractions and sample ages, from planned or measured costs.

Groups have the same order as in a real run (`rollout.staleness`). Engines sample runs in a fixed number of slots, in
the order of admission. A run samples one response. Each batch is scored and trained on, and a weight sync follows.

Two laws bound the result:

- On disjoint devices a step takes at least max(generate, score + learn + sync). Here, generate is the total time of a
  batch's runs, divided by the number of slots. If no groups are sampled ahead, a step takes at least the sum generate +
  score + learn + sync.
- With age bound 0 and a slot for each run, engines are busy for the fraction 1/τ of the sampling time. Here, τ =
  E[longest of the runs submitted together] / E[run].
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from roll_opd.rollout.staleness import GroupWindow, Pace

Length = Callable[[random.Random], float]


@dataclass(frozen=True)
class Costs:
    """The seconds that each part of a step takes.

    Each call of `run` draws the length of one run: the seconds that it takes if all slots are busy.

    With n of N slots busy, a token takes `fixed + (1 - fixed) * n / N` times as long as with all slots busy. `fixed` is
    1 if an engine spends all its time on reading weights (GPUs at moderate batch sizes). It is 0 if an engine spends
    all its time on computation.
    """

    run: Length
    score: float
    learn: float
    sync: float = 0.0
    fixed: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """Result of a simulated run. Times are in seconds, ages in versions."""

    step: float  # mean seconds of a step after the first tenth of the run
    generate: float  # seconds to sample a batch if all slots are always busy
    engine_idle: float  # share of the engines' capacity
    learner_idle: float  # share of the time in which the learner waits for a batch
    ages: tuple[int, ...] = field(repr=False)  # age of each trained group, from its admission
    trained: tuple[int, ...] = field(repr=False)  # numbers of the groups, in the order of training

    @property
    def mean_age(self) -> float:
        return fmean(self.ages)

    @property
    def max_age(self) -> int:
        return max(self.ages)


def lognormal(mean: float, spread: float) -> Length:
    """Return a sampler of lognormal lengths.

    `spread`: standard deviation of the logarithm.
    """
    return lambda rng: mean * rng.lognormvariate(-spread * spread / 2, spread)


def simulate(pace: Pace, costs: Costs, *, runs: int, slots: int, batches: int, seed: int = 0) -> Schedule:
    """Simulate a run, and return its schedule.

    Args:
        runs: number of runs per group.
        slots: number of engine slots.
        batches: number of batches.
    """
    return _Simulation(pace, costs, runs, slots, batches, seed).schedule()


class _Simulation:
    """The state of a simulation, with its event queues.

    The ends of runs are ordered by sampled seconds. Sampled seconds pass as fast as time if all slots are busy. If
    fewer slots are busy, they may pass faster. All other events are ordered by time.
    """

    def __init__(self, pace: Pace, costs: Costs, runs: int, slots: int, batches: int, seed: int) -> None:
        self._window = GroupWindow(pace, 0, batches)
        self._costs, self._runs, self._slots, self._rng = costs, runs, slots, random.Random(seed)
        self._now, self._count = 0.0, 0
        self._sampled = 0.0  # sampled seconds of a run that has been busy since the start
        self._busy: list[
            tuple[float, int, int]
        ] = []  # (end in sampled seconds, number, group): first come, first served
        self._learned_at = math.inf
        self._waiting: deque[int] = deque()  # runs without a slot, by group
        self._left: dict[int, int] = {}  # unfinished runs of a group
        self._admitted_at: dict[int, int] = {}
        self._work, self._learner_busy = 0.0, 0.0
        self._ends: list[float] = []
        self._ages: list[int] = []
        self._trained: list[int] = []

    def schedule(self) -> Schedule:
        self._admit()
        while self._busy or self._learned_at < math.inf:
            speed = self._speed
            run_at = self._now + max(0.0, self._busy[0][0] - self._sampled) / speed if self._busy else math.inf
            now = min(run_at, self._learned_at)
            self._sampled += (now - self._now) * speed
            self._now = now
            if run_at <= self._learned_at:
                self._end_run()
            else:
                self._end_learning()
        warm = len(self._ends) // 10
        step = (self._ends[-1] - self._ends[warm]) / (len(self._ends) - warm - 1) if len(self._ends) > 1 else self._now
        return Schedule(
            step,
            self._work / len(self._ends) / self._slots,
            1 - self._work / (self._slots * self._now),
            1 - self._learner_busy / self._now,
            tuple(self._ages),
            tuple(self._trained),
        )

    @property
    def _speed(self) -> float:
        """Speed of a busy run, relative to its speed with all slots busy.

        The result is 0 if no run is busy.
        """
        fixed = self._costs.fixed
        return 1 / (fixed + (1 - fixed) * len(self._busy) / self._slots) if self._busy else 0.0

    def _admit(self) -> None:
        """Admit as many groups as the window permits, and start their runs in free slots."""
        for number in self._window.admit(self._window.room):
            self._left[number], self._admitted_at[number] = self._runs, self._window.version
            self._waiting.extend([number] * self._runs)
        while self._waiting and len(self._busy) < self._slots:
            seconds = self._costs.run(self._rng)
            self._work += seconds
            self._count += 1
            heapq.heappush(self._busy, (self._sampled + seconds, self._count, self._waiting.popleft()))

    def _end_run(self) -> None:
        _, _, group = heapq.heappop(self._busy)
        self._left[group] -= 1
        if not self._left[group]:
            self._window.decide(group, passed=True)
            self._learn()
        self._admit()

    def _learn(self) -> None:
        """Start training on the next batch if the batch is complete and the learner is idle."""
        if self._learned_at < math.inf or self._window.is_complete or not (batch := self._window.take()):
            return
        version = self._window.batches - 1
        self._ages += [version - self._admitted_at[number] for number in batch]
        self._trained += batch
        seconds = self._costs.score + self._costs.learn + self._costs.sync
        self._learner_busy += seconds
        self._learned_at = self._now + seconds

    def _end_learning(self) -> None:
        self._learned_at = math.inf
        self._ends.append(self._now)
        self._window.publish(self._window.batches)
        self._admit()
        self._learn()
