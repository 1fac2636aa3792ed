"""Statistical tests on noisy series of one value per training step: lost gains and lasting shifts.

Every function takes many series at once, f64 [R, T], and is pure. Legend: R runs, T steps so far, U first windows,
S positions of a window.

Both tests compare means over windows in units of their standard error and search many windows at many steps of a
run, so the largest of several hundred correlated statistics decides. `threshold` accounts for that; its constants are
calibrated on simulated runs (`tests/tracking/test_significance.py`).
"""

import math
from dataclasses import dataclass

import numpy as np

SHORTEST = 8  # steps of a window: shorter changes are not sustained
FIRST_STEP = 3 * SHORTEST  # fits two windows and a baseline
LONGEST_SHARE, SHORTEST_SHARE = 1 / 3, 1 / 12  # of the steps so far, in one window
LENGTHS = (5, 8, 12, 18, 27, 40, 60, 90, 135, 200)  # of windows, in steps
STANDARD_ERRORS = 4.4  # with the two below, 0.3 % of runs without a change reach it, at 30 to 500 steps
FEW_STEPS = 6.0  # the threshold of a short run is larger by this share over T: its noise is estimated from few steps
MORE_TESTS, TESTS_FROM = 0.06, 100  # larger by this share with every doubling of the steps from here on: more tests
GAIN_ERRORS = 2.5  # standard errors of a gain: it is significant
LOST = 0.25  # share of a gain; a run that loses half of it has lost this share for a whole window before
RECOVERED = 2.0  # times the deepest earlier fall with a recovery
OWN = 0.6  # weight of the variance inside the best window: chance clusters of rare successes are no level
LAGS = (5, 10)  # steps at these distances differ more than neighbours if noise is correlated
STEPS_OF_A_LAG = 10  # times the lag: the steps that a run needs, so that a jump is in less than `1 - KEPT` of the pairs
KEPT, KEPT_MEAN = (
    0.75,
    0.368,
)  # share of the smallest squares, and their mean, of a chi-squared distribution of 1 degree
BY_CHANCE = 1.5  # ratio of variances that is within chance
CORRELATED = 4.0  # times the excess variance: added variance of window means of correlated steps
TINY = 1e-18


@dataclass(frozen=True)
class Lost:
    """For each series, the fall with the largest statistic among falls that lost a share of a significant gain."""

    errors: np.ndarray  # [R] standard errors of the fall, -inf without one
    first: np.ndarray  # [R] mean of the first window
    best: np.ndarray  # [R]
    last: np.ndarray  # [R]


def is_due(steps: int) -> bool:
    """Return whether a series of `steps` steps is tested: every fifth step, in long runs less often."""
    return steps >= FIRST_STEP and steps % max(5, 5 * round(steps / 100)) == 0


def threshold(steps: int) -> float:
    """Return the significance threshold, in standard errors, for a run of `steps` steps."""
    longer = MORE_TESTS * math.log2(max(steps / TESTS_FROM, 1.0))
    return STANDARD_ERRORS * (1 + FEW_STEPS / steps) * (1 + longer)


def step_variance(values: np.ndarray, stderr2: np.ndarray | None = None) -> np.ndarray:
    """Return [R] the variance of a step's value around its trend, for the mean over a window of such steps.

    Half the mean squared difference of neighbours, at least the mean of `stderr2` [R, T], the squared standard errors
    on record; more where blocks of steps vary more than independent steps would, as with prompts of which the
    difficulty drifts.
    """
    steps = values.shape[1]
    white = (np.diff(values, axis=1) ** 2).mean(1) / 2
    if stderr2 is not None:
        white = np.maximum(white, stderr2.mean(1))
    near = _apart(values, 1)
    found = white
    for lag in LAGS:
        if steps >= STEPS_OF_A_LAG * lag:
            found = np.maximum(found, white + CORRELATED * (_apart(values, lag) - BY_CHANCE * near))
    return found


def _apart(values: np.ndarray, lag: int) -> np.ndarray:
    """Return [R] the variance between steps `lag` apart, from second differences, which cancel a linear trend."""
    second = values[:, 2 * lag :] - 2 * values[:, lag:-lag] + values[:, : -2 * lag]
    smaller = np.sort(second**2, axis=1)[:, : int(KEPT * second.shape[1])]  # without a jump or a turn
    return smaller.mean(1) / KEPT_MEAN / 6


def lost_gain(values: np.ndarray, stderr2: np.ndarray | None = None) -> Lost:
    """Test the series [R, T] for a significant rise of which `LOST` or more has been lost since.

    Compares the last window with every earlier one, and that with the first. Both halves of the last window have to
    lie below, and the fall has to exceed every earlier one that the run recovered from.
    """
    runs, steps = values.shape
    sums, variance = _sums(values), step_variance(values, stderr2)
    squares = _sums(np.diff(values, axis=1) ** 2 / 2)
    lengths = _lengths(steps)
    firsts_U = np.array([length for length in LENGTHS if length <= steps / 4] or [3])
    start_RU = sums[:, firsts_U] / firsts_U
    result = Lost(*(np.full(runs, value) for value in (-np.inf, np.nan, np.nan, np.nan)))
    for last_length in lengths:
        last, later, earlier = _last_window(sums, last_length)
        deepest_R = _deepest_recovered(_windows(sums, last_length))
        for length in lengths:
            places_S = np.arange(firsts_U[0], steps - last_length - length + 1)
            if not len(places_S):
                continue
            best_RS = _windows(sums, length)[:, places_S]
            between_RS = (squares[:, -1:] - squares[:, places_S]) / (steps - places_S - 1)
            variance_RS = np.maximum(between_RS, variance[:, None]) + TINY
            gain_RUS = np.where(firsts_U[:, None] <= places_S, best_RS[:, None] - start_RU[..., None], 0.0)
            errors_RUS = gain_RUS / np.sqrt(variance_RS[:, None] * (1 / firsts_U[:, None] + 1 / length))
            surest = errors_RUS.argmax(1)[:, None]
            gain_RS = np.take_along_axis(gain_RUS, surest, 1)[:, 0]
            gained = np.take_along_axis(errors_RUS, surest, 1)[:, 0] > GAIN_ERRORS
            fall_RS = best_RS - last[:, None]
            least_RS = best_RS - np.maximum(later, earlier)[:, None]
            counts = gained & (least_RS > LOST * gain_RS) & (fall_RS > RECOVERED * deepest_R[:, None])
            own_RS = (squares[:, places_S + length - 1] - squares[:, places_S]) / (length - 1)
            squared_RS = np.maximum(variance_RS, OWN * own_RS) / length + variance_RS / last_length
            errors_RS = np.where(counts, fall_RS / np.sqrt(squared_RS), -np.inf)
            result = _larger(result, errors_RS, best_RS - gain_RS, best_RS, last)
    return result


@dataclass(frozen=True)
class Shift:
    """For each series, its last window compared with the first."""

    errors: np.ndarray  # [R] standard errors of last - first
    first: np.ndarray  # [R]
    last: np.ndarray  # [R]
    least: np.ndarray  # [R] mean of the half of the last window that is nearer to the first window


def shift(values: np.ndarray, window: int, start: int = 0) -> Shift:
    """Return the change of the series [R, T] from the `window` steps after `start` to the last `window` steps.

    The noise of each window is that of the whole series, or its own where that is larger.
    """
    sums, variance = _sums(values), step_variance(values)
    first = (sums[:, start + window] - sums[:, start]) / window
    last, later, earlier = _last_window(sums, window)
    squares = np.diff(values, axis=1) ** 2 / 2
    own = (squares[:, begin : begin + window - 1].mean(1) for begin in (start, values.shape[1] - window))
    squared = sum(np.maximum(variance, inside) for inside in own) / window
    errors = (last - first) / np.sqrt(squared + TINY)
    return Shift(errors, first, last, np.where(last > first, np.minimum(later, earlier), np.maximum(later, earlier)))


def _lengths(steps: int) -> list[int]:
    found = [n for n in LENGTHS if max(SHORTEST, steps * SHORTEST_SHARE) <= n <= steps * LONGEST_SHARE]
    return found or [SHORTEST]


def _sums(values: np.ndarray) -> np.ndarray:
    """Return [R, T + 1] the sums of the first 0, 1, ... T values."""
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)


def _windows(sums: np.ndarray, length: int) -> np.ndarray:
    """Return [R, T - length + 1] the mean of every window."""
    return (sums[:, length:] - sums[:, :-length]) / length


def _last_window(sums: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [R] the means of the last window, of its later half and of its earlier one."""
    half = length // 2
    later = (sums[:, -1] - sums[:, -1 - half]) / half
    earlier = (sums[:, -1 - half] - sums[:, -1 - length]) / (length - half)
    return (sums[:, -1] - sums[:, -1 - length]) / length, later, earlier


def _deepest_recovered(means: np.ndarray) -> np.ndarray:
    """Return [R] the deepest valley between two peaks of the smoothed series [R, S]."""
    before = np.maximum.accumulate(means, axis=1)
    after = np.maximum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
    return (np.minimum(before, after) - means).max(1)


def _larger(known: Lost, errors_RS: np.ndarray, first_RS: np.ndarray, best_RS: np.ndarray, last: np.ndarray) -> Lost:
    """Return, for each series, the known fall or the largest of the new ones, by statistic."""
    place = errors_RS.argmax(1)[:, None]
    errors, first, best = (np.take_along_axis(array, place, 1)[:, 0] for array in (errors_RS, first_RS, best_RS))
    new = errors > known.errors
    pairs = ((errors, known.errors), (first, known.first), (best, known.best), (last, known.last))
    return Lost(*(np.where(new, found, before) for found, before in pairs))
