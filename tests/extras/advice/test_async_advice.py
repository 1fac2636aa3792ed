"""The simulator and the advice against a naive loop over ticks, exhaustive search, and closed forms."""

import random
from statistics import fmean, median

import pytest

from roll_opd.extras.advice.async_advice import BOUNDS, Predictor, StepCosts, Work, fastest, spread_of
from roll_opd.extras.advice.async_simulator import Costs, lognormal, simulate
from roll_opd.rollout.staleness import Pace

COSTS = StepCosts(generate=8.0, score=1.0, learn=4.0, sync=0.2, spread=0.6)
WORK = Work(groups=16, runs=2, engines=4, training=4, is_shared=False, slots=32)


def ticked(lengths: list[int], learn: int, groups: int, runs: int, slots: int, ahead: int, batches: int) -> list[int]:
    """Ticks at which each batch ends: strict order, one tick after the other, without queues of events."""
    remaining: dict[tuple[int, int], int] = {}  # (group, run) -> ticks
    waiting = [(group, run) for group in range(groups * batches) for run in range(runs)]
    of_run = dict(zip(waiting, lengths, strict=True))
    done: set[tuple[int, int]] = set()
    version, ends, learning = 0, [], 0
    for now in range(10_000):
        for one in [one for one, left in remaining.items() if left == 0]:
            del remaining[one]
            done.add(one)
        if learning:
            learning -= 1
            if not learning:
                version += 1
                ends.append(now)
        batch = [(group, run) for group in range(version * groups, (version + 1) * groups) for run in range(runs)]
        if not learning and version < batches and done.issuperset(batch):
            learning = learn
        while waiting and len(remaining) < slots and waiting[0][0] < (version + 1) * groups + ahead:
            one = waiting.pop(0)
            remaining[one] = of_run[one]
        if version == batches:
            return ends
        remaining = {one: left - 1 for one, left in remaining.items()}
    raise AssertionError


@pytest.mark.parametrize(("ahead", "slots", "learn"), [(0, 5, 7), (4, 5, 7), (8, 16, 20), (2, 3, 3)])
def test_schedules_are_those_of_a_loop_over_ticks(ahead: int, slots: int, learn: int) -> None:
    rng = random.Random(ahead)
    lengths = [rng.choice([2, 4, 6, 30]) for _ in range(4 * 2 * 12)]
    wanted = ticked(lengths, learn, 4, 2, slots, ahead, 12)
    drawn = iter(lengths)
    costs = Costs(lambda rng: next(drawn), score=0.0, learn=float(learn))
    found = simulate(Pace(4, ahead), costs, runs=2, slots=slots, batches=12)
    warm = len(wanted) // 10
    assert found.step == pytest.approx((wanted[-1] - wanted[warm]) / (len(wanted) - warm - 1))
    assert found.trained == tuple(range(48))


@pytest.mark.parametrize(("fixed", "seconds"), [(1.0, 3.0), (0.0, 0.75), (0.4, 1.65)])
def test_tokens_of_few_answers_take_their_share(fixed: float, seconds: float) -> None:
    """Four answers of 3 s in 16 slots: a token takes fixed + (1 - fixed) / 4 of its time."""
    costs = Costs(lambda rng: 3.0, 0.0, 0.0, fixed=fixed)
    assert simulate(Pace(2), costs, runs=2, slots=16, batches=10).step == pytest.approx(seconds)


def test_the_measured_layout_has_its_measured_step() -> None:
    found = Predictor(COSTS, WORK).predict(4, 4)
    assert found.step == pytest.approx(8.0 + 1.0 + 4.0 + 0.2, rel=0.05)


def test_the_fastest_split_is_that_of_an_exhaustive_search() -> None:
    predictor = Predictor(COSTS, WORK)
    best = fastest(predictor.predictions(12))
    every = [predictor.predict(engines, 12 - engines, bound) for engines in range(1, 12) for bound in BOUNDS]
    assert best.step <= 1.1 * min(one.step for one in every)


def test_a_step_on_more_devices_is_shorter_until_its_longest_answer() -> None:
    """Twice the devices need half the time, but no number of devices is faster than an answer."""
    predictor = Predictor(COSTS, WORK)
    small, large, huge = (fastest(predictor.predictions(devices)).step for devices in (8, 16, 4096))
    assert large == pytest.approx(small / 2, rel=0.2)
    assert huge < large and huge > COSTS.sync


def test_engines_that_share_all_devices_take_turns() -> None:
    """With no waiting for long answers, turns on all devices are as fast as two halves ahead of each other."""
    work = Work(groups=16, runs=2, engines=4, training=4, is_shared=True, slots=8)
    found = Predictor(StepCosts(8.0, 0.0, 8.0, 0.0, spread=0.0), work).predictions(4)
    turns = next(one for one in found if one.is_shared)
    halves = min((one for one in found if one.engines == 2), key=lambda one: one.step)
    assert turns.step == pytest.approx(16.0, rel=0.01) and halves.step == pytest.approx(16.0, rel=0.05)


def test_a_layout_without_room_has_no_prediction() -> None:
    work = Work(groups=4, runs=2, engines=8, training=8, is_shared=False, slots=8, engine_size=8, replica_size=8)
    assert Predictor(COSTS, work).predictions(4) == []


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_the_spread_comes_back_from_the_longest_answer(spread: float) -> None:
    draw, rng, count = lognormal(1.0, spread), random.Random(1), 256
    samples = [[draw(rng) for _ in range(count)] for _ in range(60)]
    ratio = median(max(sample) / fmean(sample) for sample in samples)
    assert spread_of(ratio, count) == pytest.approx(spread, rel=0.15)
