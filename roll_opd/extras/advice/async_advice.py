"""Predict step times for different splits of devices between engines and training, and for different age bounds.

The costs are the seconds that each part of a step takes if the parts run one after the other. They were measured or
planned for one layout. For more devices, the prediction assumes:

- Engines have proportionally more slots.
- Scoring and learning take proportionally less time, until each replica of the student has one sequence per update.
- Weight sync takes the same time.

Communication between more devices is not modelled. So measure the costs near the layout of interest.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from roll_opd.extras.advice.async_simulator import Costs, Length, lognormal, simulate
from roll_opd.rollout.staleness import Pace

BOUNDS = (0, 1, 2, 4, 8)
AS_FAST = 1.03  # of the predictions within this factor of the shortest step, the smallest bound is chosen
RUNS, MIN_BATCHES, MAX_BATCHES = 10_000, 10, 60  # simulated batches: enough for `RUNS` runs
STEPS_ASIDE = 32  # 1 / STEPS_ASIDE of all splits lie between two simulated splits


@dataclass(frozen=True)
class StepCosts:
    """Seconds of each part of a step, and the distribution of run lengths.

    The distribution is lognormal, cut at a limit.
    """

    generate: float
    score: float
    learn: float
    sync: float
    spread: float = 0.5  # standard deviation of the logarithm of a length
    longest: float = math.inf  # limit of a length, as a multiple of the uncut distribution's mean
    fixed: float = 1.0  # see `async_simulator.Costs`


@dataclass(frozen=True)
class DeviceSplit:
    """The devices of a run."""

    engines: int  # devices of the engines
    training: int  # devices of student, teachers, reference and critic
    is_shared: bool  # engines and training take turns on the same devices

    @property
    def devices(self) -> int:
        return self.engines if self.is_shared else self.engines + self.training


@dataclass(frozen=True, kw_only=True)
class Work(DeviceSplit):
    """The size of a batch, and the devices on which the costs were measured or planned."""

    groups: int
    runs: int  # runs per group
    slots: int  # runs that the engines sample at the same time
    engine_size: int = 1  # devices of an engine
    replica_size: int = 1  # devices of a replica of the student
    most_replicas: int = 1 << 20  # sequences of an update


@dataclass(frozen=True)
class Prediction(DeviceSplit):
    """The predicted schedule for one split of the devices and one age bound.

    `step` is in seconds. Idle times are fractions. Ages are in versions.
    """

    bound: int
    step: float
    engine_idle: float
    training_idle: float
    mean_age: float
    max_age: int


class Predictor:
    """Predicts step times from costs.

    The constructor runs a simulation to find how many seconds a run takes.
    """

    def __init__(self, costs: StepCosts, work: Work) -> None:
        self._costs, self._work = costs, work
        self._batches = max(MIN_BATCHES, min(MAX_BATCHES, RUNS // (work.groups * work.runs)))
        drawn = lognormal(1.0, costs.spread)
        self._run: Length = lambda rng: min(drawn(rng), costs.longest)
        whole = Costs(self._run, 0.0, 0.0, fixed=costs.fixed)
        in_turns = simulate(
            Pace.of(work.groups, 0), whole, runs=work.runs, slots=work.slots, batches=self._batches, seed=1
        )
        self._seconds = costs.generate / in_turns.step  # seconds of a run of length 1
        self._busy = self._seconds * in_turns.generate  # seconds of a batch on engines whose slots are all busy

    def predict(self, engines: int, training: int, bound: int = 0, *, is_shared: bool = False) -> Prediction:
        """Return the predicted schedule for these numbers of devices and this age bound.

        Args:
            engines: number of devices for the engines.
            training: number of devices for training.
            is_shared: engines and training run on the same devices.
        """
        costs, work, run, seconds = self._costs, self._work, self._run, self._seconds
        faster = self._replicas(work.training) / self._replicas(training)
        parts = Costs(
            lambda rng: run(rng) * seconds, costs.score * faster, costs.learn * faster, costs.sync, costs.fixed
        )
        slots = max(1, round(work.slots * engines / work.engines))
        pace = Pace.of(work.groups, bound)
        found = simulate(pace, parts, runs=work.runs, slots=slots, batches=self._batches)
        return Prediction(
            engines,
            training,
            is_shared,
            bound,
            found.step,
            found.engine_idle,
            found.learner_idle,
            found.mean_age,
            found.max_age,
        )

    def predictions(self, devices: int, bounds: Sequence[int] = BOUNDS) -> list[Prediction]:
        """Return the predicted schedules for a number of devices.

        There is one schedule for shared devices, on which engines and training take turns. Several splits of the
        devices have one schedule per age bound. The splits are near the best split. If the costs were measured on the
        same number of devices, the measured split is included.

        The list is empty if the devices cannot be divided into whole engines and whole replicas of the student.
        """
        work = self._work
        found = []
        if devices % work.engine_size == 0 and devices % work.replica_size == 0:
            found.append(self.predict(devices, devices, is_shared=True))
        return found + [
            self.predict(engines, devices - engines, bound) for engines in self._splits(devices) for bound in bounds
        ]

    def _splits(self, devices: int) -> Iterator[int]:
        """Yield numbers of devices for the engines, in ascending order.

        The best number is the one with the shortest step if no part of a step waits for another part. The results are
        this number, and numbers near it.
        """
        work, costs = self._work, self._costs
        possible = [
            engines
            for engines in range(work.engine_size, devices, work.engine_size)
            if (devices - engines) % work.replica_size == 0
        ]
        if not possible:
            return

        def longer_side(engines: int) -> float:
            learn = (costs.score + costs.learn) * self._replicas(work.training) / self._replicas(devices - engines)
            return max(self._busy * work.engines / engines, learn + costs.sync)

        best = min(range(len(possible)), key=lambda place: longer_side(possible[place]))
        aside = max(1, len(possible) // STEPS_ASIDE)
        chosen = {possible[place] for place in (best - aside, best, best + aside) if 0 <= place < len(possible)}
        if not work.is_shared and devices == work.devices:
            chosen.add(work.engines)
        yield from sorted(chosen)

    def _replicas(self, training: int) -> float:
        return min(training / self._work.replica_size, self._work.most_replicas)


def fastest(predictions: Sequence[Prediction]) -> Prediction:
    """Return the prediction with the smallest age bound among the nearly fastest predictions.

    A prediction is nearly the fastest if its step takes at most `AS_FAST` times the shortest step.
    """
    least = min(one.step for one in predictions)
    return min((one for one in predictions if one.step <= AS_FAST * least), key=lambda one: (one.bound, one.step))


def spread_of(ratio: float, count: int) -> float:
    """Return the spread of a lognormal distribution, given the ratio of its largest sample to its mean.

    Args:
        ratio: typical value of the largest sample in a set, divided by the mean of the distribution.
        count: number of samples in the set.

    The largest sample is near the quantile 1 - 1 / count, which is exp(z s - s² / 2) times the mean. The result is the
    smaller root s of exp(z s - s² / 2) = ratio. The left side is at most exp(z² / 2). If the ratio is equal to this
    value or larger, the result is z.
    """
    z = NormalDist().inv_cdf(1 - 1 / max(count, 3))
    return z - math.sqrt(max(0.0, z * z - 2 * math.log(max(ratio, 1.0))))
