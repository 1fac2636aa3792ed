"""Statistical tests for lost gains and lasting shifts in noisy series, which have one value per training step.

All functions are pure and take several series, f64 [R, T]. The letters in array shapes are:

- R: number of runs.
- T: number of steps so far.
- M: number of lengths of the last window.
- L: number of lengths of the best window. A best window ends where the last window starts.

Both tests compare the means of two windows and express the difference in standard errors. A run is tested with many
pairs of windows and after many steps. The limits `least_evidence` and `threshold` take all of these tests into account.
`benchmarks/reward_alarm.py` derives `least_evidence` by simulation, and compares the test with the most powerful test.
"""

import math
from dataclasses import dataclass

import numpy as np

FIRST_STEP = 30
SHORTEST = 5  # minimum steps of a window: shorter changes are not sustained
SHARES = (0.17, 0.22, 0.29, 0.37, 0.48, 0.63)  # lengths of best and last windows, as fractions of the steps so far
# minimum steps of the first window, and its lengths as fractions of the steps so far
SHORTEST_START, START_SHARES = 4, (0.04, 0.08, 0.16, 0.3)
PRIOR = 0.7  # V / (1 + V) for a fall with a normal prior of variance V, in squared standard errors of the fall
FREEDOM = 2 / 3  # degrees of freedom per step of the mean squared difference of neighbours
GAIN_ERRORS = 2.0  # a gain is significant from this many standard errors on
LOST = 0.25  # fraction of a gain that must be lost; low, as the last window also has steps of the fall
RECOVERED = 2.0  # a fall must exceed the deepest earlier fall with a recovery by this factor
VALLEY_ERRORS = 3.2  # a fall with a recovery counts from this many standard errors on
# log likelihood ratio at `FIRST_STEP`, and its increase per doubling of the steps
EVIDENCE, EVIDENCE_PER_DOUBLING = 2.5, 0.5
# threshold of a shift; with the two corrections below, 0.3 % of runs without a change exceed it at 30 to 500 steps
STANDARD_ERRORS = 4.4
FEW_STEPS = 6.0  # the threshold is larger by the factor 1 + FEW_STEPS / T: few steps give a poor estimate of the noise
# from `TESTS_FROM` steps on, the threshold grows by this fraction per doubling of the steps: there are more tests
MORE_TESTS, TESTS_FROM = 0.06, 100
# steps of a block, as a fraction of all steps and with bounds; means over blocks show correlated noise
BLOCK_SHARE, SHORTEST_BLOCK, LONGEST_BLOCK = 1 / 20, 4, 25
BLOCKS = 15  # fewest blocks of a series tested for correlation; in shorter series, turns and jumps dominate
# only the smallest squares are used, this fraction of all; the mean of this part of a chi-squared distribution with 1
# degree of freedom
KEPT, KEPT_MEAN = 0.65, 0.259
BY_CHANCE = 5.0  # for 2.5 % of white-noise series, the ratio of variances is above 1 + BY_CHANCE * sqrt(block / T)
LONGER_CORRELATION = 1.3  # factor on the variance found in blocks, as correlation extends beyond a block
TINY = 1e-18


@dataclass(frozen=True)
class Lost:
    """Evidence that each series is losing an earlier gain, and the window means of its most significant fall."""

    evidence: np.ndarray  # [R] log of the mean likelihood ratio of all falls, -inf without a fall
    errors: np.ndarray  # [R] standard errors of the most significant fall
    first: np.ndarray  # [R] mean of the first window
    best: np.ndarray  # [R]
    last: np.ndarray  # [R]


def is_due(steps: int) -> bool:
    """Return whether a series is tested after `steps` steps.

    The test runs at every fifth step, and less often in long runs.
    """
    return steps >= FIRST_STEP and steps % max(5, 5 * round(steps / 100)) == 0


def least_evidence(steps: int) -> float:
    """Return the limit on `Lost.evidence` after `steps` steps.

    If the evidence is above the limit, the run is losing its gain.
    """
    return EVIDENCE + EVIDENCE_PER_DOUBLING * math.log2(max(steps, FIRST_STEP) / FIRST_STEP)


def threshold(steps: int) -> float:
    """Return the threshold above which a shift is significant after `steps` steps, in standard errors."""
    longer = MORE_TESTS * math.log2(max(steps / TESTS_FROM, 1.0))
    return STANDARD_ERRORS * (1 + FEW_STEPS / steps) * (1 + longer)


def step_variance(values: np.ndarray, stderr2: np.ndarray | None = None) -> np.ndarray:
    """Return the variance of a step's value around the trend, [R].

    The standard error of a window's mean is computed from this variance.

    The variance is half the mean squared difference of neighbouring steps (von Neumann 1941). It is at least the mean
    of the recorded squared standard errors, `stderr2` [R, T].

    The values of neighbouring steps may be correlated, for example if the difficulty of the prompts drifts. The means
    over blocks of steps then vary significantly more than the means of independent steps. In this case, the variance is
    computed from the block means (method of batch means).
    """
    steps = values.shape[1]
    white = (np.diff(values, axis=1) ** 2).mean(1) / 2
    if stderr2 is not None:
        white = np.maximum(white, stderr2.mean(1))
    block = min(LONGEST_BLOCK, max(SHORTEST_BLOCK, int(steps * BLOCK_SHARE)))
    if steps < BLOCKS * block:
        return white
    blocks = block * _lag_variance(_windows(_sums(values), block), block)
    is_correlated = blocks > white * (1 + BY_CHANCE * math.sqrt(block / steps))
    return np.where(is_correlated, LONGER_CORRELATION * blocks, white)


def _lag_variance(values: np.ndarray, lag: int) -> np.ndarray:
    """Return the variance of each series around a linear trend, [R].

    The variance is estimated from second differences of values that are `lag` steps apart, because a linear trend does
    not change second differences.
    """
    second = values[:, 2 * lag :] - 2 * values[:, lag:-lag] + values[:, : -2 * lag]
    # the largest differences, from a jump or a turn, are left out
    smaller = np.sort(second**2, axis=1)[:, : int(KEPT * second.shape[1])]
    return smaller.mean(1) / KEPT_MEAN / 6


def lost_gain(values: np.ndarray, stderr2: np.ndarray | None = None) -> Lost:
    """Test whether each series [R, T] rises significantly and later loses at least the fraction `LOST` of the gain.

    A fall is the mean of a best window minus the mean of the last window, which has all later steps. The last window is
    averaged twice: with equal weights, and with weights 1, 2, 3, ... that detect a continuing fall. If the curve still
    rises, the expected fall is zero or negative.

    Each fall has a likelihood ratio. For a fall of z standard errors whose size has a normal prior, the ratio is
    exp(PRIOR z^2 / 2) up to a constant factor (Wakefield 2009). The evidence is the log of the mean ratio over all
    windows and weights.

    A fall counts only if all three conditions hold:

    - It loses more than the fraction `LOST` of a significant gain.
    - Both halves of the last window lie below the best window.
    - It is more than `RECOVERED` times as large as every earlier fall from which the run recovered.
    """
    steps = values.shape[1]
    sums, variance_R = _sums(values), step_variance(values, stderr2)
    windows = _lengths(SHARES, SHORTEST, steps)
    last_M1, best_1L = windows[:, None], windows[None, :]
    ends_M = steps - windows  # ends of best windows
    starts_ML = np.maximum(ends_M[:, None] - best_1L, 0)
    best_RML = (sums[:, ends_M, None] - sums[:, starts_ML]) / best_1L
    variance_RML = np.maximum(variance_R[:, None, None], _later_variance(values, starts_ML)) + TINY
    gain_RML, gain_errors_RML = _gain(sums, best_RML, variance_RML / best_1L, variance_RML, starts_ML)

    level_RM = (sums[:, -1:] - sums[:, ends_M]) / windows
    growing_RM = _growing_mean(values, sums, ends_M)
    half_RM = np.maximum(*_halves(sums, windows))
    valley_RM = _recovered(sums, windows, variance_R)
    fits_ML = ends_M[:, None] - best_1L >= SHORTEST_START
    fall_RML = best_RML - level_RM[..., None]
    counts_RML = fits_ML & (gain_errors_RML > GAIN_ERRORS) & (fall_RML > LOST * gain_RML)
    counts_RML &= (best_RML > half_RM[..., None]) & (fall_RML > RECOVERED * valley_RM[..., None])

    squares_M1 = 2 * (2 * last_M1 + 1) / (3 * last_M1 * (last_M1 + 1))  # sum of the squared growing weights
    falls = ((fall_RML, 1 / last_M1), (best_RML - growing_RM[..., None], squares_M1))
    z2_RKML = np.stack([_normal(fall, variance_RML * (1 / best_1L + extra), steps) for fall, extra in falls], 1)
    ratio_RKML = np.where(counts_RML[:, None], np.exp(np.minimum(PRIOR * z2_RKML / 2, 600)), 0.0)
    with np.errstate(divide="ignore"):
        evidence = np.log(ratio_RKML.mean((1, 2, 3)))
    place_R1 = ratio_RKML.sum(1).reshape(len(values), -1).argmax(1)[:, None]
    found = (np.sqrt(z2_RKML.max(1)), best_RML - gain_RML, best_RML, best_RML - fall_RML)
    return Lost(evidence, *(np.take_along_axis(array.reshape(len(values), -1), place_R1, 1)[:, 0] for array in found))


def _lengths(shares: tuple[float, ...], shortest: int, steps: int) -> np.ndarray:
    """Return the window lengths in steps, sorted and without duplicates.

    Each length is a fraction of all steps (one of `shares`), but at least `shortest`.
    """
    return np.unique(np.maximum(shortest, np.round(np.array(shares) * steps)).astype(int))


def _later_variance(values: np.ndarray, starts_ML: np.ndarray) -> np.ndarray:
    """Return the variance of the values from each start to the last step, [R, M, L].

    The variance is computed separately for each start, because rewards near 0 or 1 vary less than other rewards.
    """
    squares = _sums(np.diff(values, axis=1) ** 2 / 2)
    return (squares[:, -1:, None] - squares[:, starts_ML]) / (values.shape[1] - 1 - starts_ML)


def _gain(
    sums: np.ndarray, best_RML: np.ndarray, squared_RML: np.ndarray, variance_RML: np.ndarray, starts_ML: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (gains, errors) of the best windows, [R, M, L] each. `errors` are the gains in standard errors.

    A gain is the mean of a best window minus the mean of a first window. Of several first windows, the one with the
    most significant gain is used.
    """
    gain, errors = np.zeros(best_RML.shape), np.full(best_RML.shape, -np.inf)
    for length in _lengths(START_SHARES, SHORTEST_START, sums.shape[1] - 1):
        new = best_RML - (sums[:, length] / length)[:, None, None]
        new_errors = np.where(length <= starts_ML, new / np.sqrt(squared_RML + variance_RML / length), -np.inf)
        gain, errors = np.where(new_errors > errors, new, gain), np.maximum(errors, new_errors)
    return gain, errors


def _growing_mean(values: np.ndarray, sums: np.ndarray, ends_M: np.ndarray) -> np.ndarray:
    """Return the weighted mean of each last window, [R, M].

    The steps of a window have the weights 1, 2, 3 and so on.
    """
    steps = values.shape[1]
    moments = _sums(values * np.arange(1, steps + 1))
    weighted = moments[:, -1:] - moments[:, ends_M] - ends_M * (sums[:, -1:] - sums[:, ends_M])
    return 2 * weighted / ((steps - ends_M) * (steps - ends_M + 1))


def _normal(fall: np.ndarray, squared: np.ndarray, steps: int) -> np.ndarray:
    """Convert the t statistic of a fall to the squared z-score that has the same likelihood ratio."""
    freedom = FREEDOM * steps
    return freedom * np.log1p(np.maximum(fall, 0) ** 2 / squared / freedom)


def _halves(sums: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (means of the later halves, means of the earlier halves) of the last windows, [R, M] each."""
    middles = sums.shape[1] - 1 - windows // 2
    later = (sums[:, -1:] - sums[:, middles]) / (windows // 2)
    return later, (sums[:, middles] - sums[:, -1 - windows]) / (windows - windows // 2)


def _recovered(sums: np.ndarray, windows: np.ndarray, variance_R: np.ndarray) -> np.ndarray:
    """Return the depth of the deepest valley between two peaks of each smoothed series, [R, M].

    Each series is smoothed with each window length. If the valley is not significant, the depth is 0.
    """
    deepest = []
    for length in windows:
        means = _windows(sums, length)
        before = np.maximum.accumulate(means, axis=1)
        after = np.maximum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
        valley = (np.minimum(before, after) - means).max(1)
        deepest.append(np.where(valley > VALLEY_ERRORS * np.sqrt(2 * variance_R / length), valley, 0.0))
    return np.stack(deepest, 1)


@dataclass(frozen=True)
class Shift:
    """A comparison of the last window of each series with an earlier window."""

    errors: np.ndarray  # [R] standard errors of last - first
    first: np.ndarray  # [R]
    last: np.ndarray  # [R]
    least: np.ndarray  # [R] mean of the half of the last window that is nearer to the first window


def shift(values: np.ndarray, window: int, start: int = 0) -> Shift:
    """Compare an earlier window of each series [R, T] with its last window. Both windows have `window` steps.

    The earlier window begins at step `start`. The variance of a window is the larger of two estimates: from the whole
    series, and from the window only.
    """
    sums, variance = _sums(values), step_variance(values)
    first = (sums[:, start + window] - sums[:, start]) / window
    last = (sums[:, -1] - sums[:, -1 - window]) / window
    later, earlier = (half[:, 0] for half in _halves(sums, np.array([window])))
    squares = np.diff(values, axis=1) ** 2 / 2
    own = (squares[:, begin : begin + window - 1].mean(1) for begin in (start, values.shape[1] - window))
    squared = sum(np.maximum(variance, inside) for inside in own) / window
    errors = (last - first) / np.sqrt(squared + TINY)
    return Shift(errors, first, last, np.where(last > first, np.minimum(later, earlier), np.maximum(later, earlier)))


def _sums(values: np.ndarray) -> np.ndarray:
    """Return the cumulative sums of each series, [R, T + 1]. The first sum is 0."""
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)


def _windows(sums: np.ndarray, length: int) -> np.ndarray:
    """Return the mean of every window with `length` steps, [R, T - length + 1]."""
    return (sums[:, length:] - sums[:, :-length]) / length
