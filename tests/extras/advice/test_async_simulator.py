"""The simulator of schedules against known laws: rooflines, queueing, ages, and lengths of trained groups."""

import math
import random
from bisect import bisect
from itertools import pairwise
from statistics import fmean

import pytest

from roll_opd.extras.advice.async_simulator import Costs, lognormal, simulate
from roll_opd.rollout.staleness import Pace

COSTS = Costs(lognormal(1.0, 0.3), score=0.5, learn=2.5, sync=0.1)
SLOTS, RUNS, GROUPS = 40, 4, 32


def of(bound: int, depth: int | None = None, costs: Costs = COSTS, batches: int = 150):
    return simulate(Pace.of(GROUPS, bound, depth), costs, runs=RUNS, slots=SLOTS, batches=batches)


def test_constant_costs_have_the_step_time_of_the_formula() -> None:
    """At bound 0 the step is the sum of the parts; with one batch ahead it is the longer side."""
    costs = Costs(lambda rng: 2.0, score=0.5, learn=2.0, sync=0.25)
    waves = -(-GROUPS * RUNS // SLOTS)
    assert simulate(Pace.of(GROUPS, 0), costs, runs=RUNS, slots=SLOTS, batches=20).step == pytest.approx(
        waves * 2 + 2.75
    )
    for slots, generate in ((GROUPS * RUNS, 2.0), (GROUPS * RUNS // 4, 8.0)):
        found = simulate(Pace.of(GROUPS, 1), costs, runs=RUNS, slots=slots, batches=20)
        assert found.step == pytest.approx(max(generate, 2.75), rel=0.01)


@pytest.mark.parametrize("spread", [0.3, 1.0, 1.6])
def test_a_larger_bound_is_not_slower_and_no_faster_than_the_roofline(spread: float) -> None:
    costs = Costs(lognormal(1.0, spread), score=0.5, learn=2.5, sync=0.1)
    steps = [of(bound, costs=costs) for bound in (0, 1, 2, 4)]
    for slower, faster in pairwise(steps):
        assert faster.step < 1.02 * slower.step
    for found in steps:
        assert found.step >= 0.97 * max(found.generate, 3.1)


@pytest.mark.parametrize(("bound", "spread"), [(2, 0.3), (4, 0.8), pytest.param(8, 1.0, marks=pytest.mark.nightly)])
def test_enough_batches_ahead_reach_the_roofline(bound: float, spread: float) -> None:
    """A step on disjoint devices takes at most 1.10 times the longer side; a longer tail needs a larger bound."""
    costs = Costs(lognormal(1.0, spread), score=0.5, learn=2.5, sync=0.1)
    found = of(bound, costs=costs)
    assert found.step <= 1.10 * max(found.generate, 3.1)
    assert of(0, costs=costs).step / found.step > 1.4


def test_a_depth_below_the_bound_halves_the_age_at_the_same_speed() -> None:
    """The default of the depth rests on it: groups pass a slow one inside the window."""
    costs = Costs(lognormal(1.0, 1.0), score=0.5, learn=2.5, sync=0.1)
    strict, windowed = of(4, 4, costs), of(4, None, costs)
    assert windowed.step < 1.03 * strict.step
    assert windowed.mean_age < 0.6 * strict.mean_age


@pytest.mark.parametrize("spread", [0.8, *(pytest.param(each, marks=pytest.mark.nightly) for each in (0.3, 1.2))])
def test_submission_of_whole_batches_has_the_utilisation_of_the_law(spread: float) -> None:
    """At 0 with a slot for each run, engines are busy for 1/τ of a batch's sampling; τ = E[slowest] / E[run]."""
    draw, rng = lognormal(1.0, spread), random.Random(3)
    slowest = fmean(max(draw(rng) for _ in range(GROUPS * RUNS)) for _ in range(400))
    costs = Costs(draw, score=0.0, learn=0.0)
    found = simulate(Pace.of(GROUPS, 0), costs, runs=RUNS, slots=GROUPS * RUNS, batches=300)
    assert 1 - found.engine_idle == pytest.approx(1 / slowest, rel=0.1)


@pytest.mark.parametrize(("bound", "spread"), [(1, 0.3), (2, 0.8), (4, 1.2)])
def test_the_mean_age_of_busy_engines_is_the_groups_ahead(bound: int, spread: float) -> None:
    """With strict order, a group is trained as many versions after its admission as batches are ahead."""
    found = of(bound, bound, Costs(lognormal(1.0, spread), score=0.5, learn=2.5, sync=0.1))
    assert found.mean_age == pytest.approx(bound, rel=0.1)
    assert max(found.ages) <= Pace.of(GROUPS, bound, bound).max_age


@pytest.mark.parametrize("depth", [4, 1])
def test_lengths_of_trained_groups_are_those_of_the_sampled_ones(depth: int) -> None:
    """Nothing is discarded, at lengths that differ by a factor of ten and more: every group is trained."""
    costs = Costs(lognormal(1.0, 1.2), score=0.1, learn=0.5)
    found = simulate(Pace.of(8, 4, depth), costs, runs=2, slots=16, batches=1250)
    assert sorted(found.trained) == list(range(10_000))


def test_a_run_that_takes_twenty_steps_is_trained() -> None:
    """The other groups continue inside the window, and then wait for it."""
    lengths = iter([70.0])
    costs = Costs(lambda rng: next(lengths, 1.0), score=0.5, learn=2.5)
    pace = Pace.of(8, 4, 2)
    found = simulate(pace, costs, runs=1, slots=8, batches=40)
    place = found.trained.index(0)
    assert place >= 16  # others have passed it
    assert sorted(found.trained) == list(range(320)) and found.ages[place] <= pace.max_age


@pytest.mark.parametrize(
    ("bound", "depth"), [(4, 1), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((1, 1), (4, 4)))]
)
def test_trained_lengths_have_the_distribution_of_the_sampled_ones(bound: int, depth: int) -> None:
    """Also in a run that is stopped in the middle: no length is preferred. 5 % of the lengths are 10 times as long as
    another 5 %."""
    groups, runs, draw, lengths = 8, 2, lognormal(1.0, math.log(10) / (2 * 1.645)), list[float]()

    def recorded(rng: random.Random) -> float:
        lengths.append(draw(rng))  # runs start in the order of their groups
        return lengths[-1]

    found = simulate(
        Pace.of(groups, bound, depth), Costs(recorded, score=0.1, learn=0.5), runs=runs, slots=16, batches=1250
    )
    for batches in (400, 800, 1250):
        trained = [length for n in found.trained[: batches * groups] for length in lengths[n * runs : (n + 1) * runs]]
        assert distance(trained, lengths[: batches * groups * runs]) < 0.02


def distance(some: list[float], others: list[float]) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples."""
    some, others = sorted(some), sorted(others)
    shares = ((bisect(some, x) / len(some), bisect(others, x) / len(others)) for x in [*some, *others])
    return max(abs(one - other) for one, other in shares)


def test_the_distance_sees_a_run_that_prefers_short_answers() -> None:
    """The control: without the longest 3 % the distance is above the limit."""
    draw, rng = lognormal(1.0, 0.7), random.Random(1)
    lengths = [draw(rng) for _ in range(6400)]
    assert distance(sorted(lengths)[: int(0.97 * len(lengths))], lengths) > 0.02
