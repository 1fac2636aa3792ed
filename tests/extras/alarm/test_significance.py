"""Detection and false-alarm rates of the lost-gain test on simulated runs of many kinds.

A step's value is the mean reward of `prompts` x `samples`; a prompt is easy or hard, so that its samples are
correlated. Seeds are fixed.
"""

import numpy as np
import pytest

from roll_opd.extras.alarm.significance import is_due, least_evidence, lost_gain, shift, step_variance

RUNS = 250


def rewards(rng: np.random.Generator, curve: np.ndarray, prompts: int = 16, samples: int = 4) -> np.ndarray:
    """Return f64 [RUNS, T] mean rewards of 0 or 1 with the expectations `curve` [T]; prompts are easy or hard."""
    mean = np.broadcast_to(np.clip(curve, 0, 1), (RUNS, len(curve)))[..., None]
    easy = rng.random((RUNS, len(curve), prompts)) < mean
    chance = np.where(easy, 0.85 + 0.15 * mean, 0.15 * mean)  # of a sample: its mean is `mean` again
    return rng.binomial(samples, chance).mean(2) / samples


def sounded(values: np.ndarray, stderr2: np.ndarray | None = None) -> float:
    """Return the share of the runs [R, T] that are found to have lost their gain after any of their steps."""
    found = np.zeros(len(values), bool)
    for steps in filter(is_due, range(values.shape[1] + 1)):
        parts = (None if array is None else array[:, :steps] for array in (values, stderr2))
        found |= lost_gain(*parts).evidence > least_evidence(steps)
    return float(found.mean())


def at(steps: int) -> np.ndarray:
    return np.arange(steps) / steps


HEALTHY = {
    "flat": lambda t: 0.3 + 0 * t,
    "high": lambda t: 0.8 + 0 * t,
    "rising": lambda t: 0.2 + 0.3 * t,
    "then level": lambda t: np.minimum(0.2 + 2.5 * t, 0.7),
    "to 1": lambda t: 1 - 0.9 * np.exp(-8 * t),
    "in steps": lambda t: 0.15 + 0.2 * np.floor(4 * t),
    "sparse": lambda t: 0.003 + 0 * t,
    "solved at once": lambda t: np.where(t > 0.3, 1.0, 0.0),
}


def test_expectations_of_the_simulated_rewards() -> None:
    rng = np.random.default_rng(0)
    assert rewards(rng, np.full(200, 0.4)).mean() == pytest.approx(0.4, abs=0.01)


@pytest.mark.slow
def test_a_healthy_run_has_lost_nothing() -> None:
    """Below 1 % over all, with and without standard errors on record, at 30 to 300 steps."""
    rng = np.random.default_rng(1)
    shares = {}
    for name, curve in HEALTHY.items():
        for steps, prompts in ((30, 64), (100, 16), (100, 128)):
            shares[name, steps, prompts] = sounded(rewards(rng, curve(at(steps)), prompts))
    assert np.mean(list(shares.values())) < 0.004 and max(shares.values()) <= 0.016, shares


@pytest.mark.slow
def test_a_long_healthy_run_has_lost_nothing() -> None:
    rng = np.random.default_rng(2)
    shares = [sounded(rewards(rng, HEALTHY[name](at(400)))) for name in ("flat", "rising", "then level", "sparse")]
    assert np.mean(shares) < 0.006, shares


def test_other_ranges_and_noise_that_is_not_of_prompts() -> None:
    rng = np.random.default_rng(3)
    steps = 100
    level = rewards(rng, HEALTHY["then level"](at(steps)))
    drift = np.zeros_like(level)
    for step in range(1, steps):
        drift[:, step] = 0.6 * drift[:, step - 1] + rng.normal(0, 0.03, RUNS)
    noises = {
        "another range": 500 * level - 700,
        "negative": -level,
        "difficulty of steps": level + rng.normal(0, 0.08, level.shape),
        "drifting difficulty": level + drift,
        "outliers": level + 0.03 * rng.standard_t(2, level.shape),
        "constant": np.full((2, steps), 0.3),
        "one failed step": level * (np.arange(steps) != 80),
        "a short cycle": level + 0.05 * np.sin(2 * np.pi * (np.arange(steps) / 10 + rng.random((RUNS, 1)))),
    }
    shares = {name: sounded(values) for name, values in noises.items()}
    assert max(shares.values()) <= 0.012, shares


LOSING = {
    "slowly": lambda t: 0.2 + 0.5 * np.minimum(t / 0.3, 1) - 0.25 * np.clip((t - 0.3) / 0.5, 0, 1),
    "suddenly": lambda t: 0.2 + 0.5 * np.minimum(t / 0.4, 1) - 0.25 * (t > 0.7),
    "early": lambda t: 0.2 + 0.5 * np.minimum(t / 0.2, 1) - 0.25 * np.clip((t - 0.25) / 0.2, 0, 1),
    "late": lambda t: 0.2 + 0.5 * np.minimum(t / 0.6, 1) - 0.25 * np.clip((t - 0.7) / 0.1, 0, 1),
    "all of a large gain": lambda t: 0.95 * np.minimum(t / 0.4, 1) * np.clip((1 - t) / 0.4, 0, 1),
}


@pytest.mark.parametrize(("steps", "prompts"), [pytest.param(150, 16, marks=pytest.mark.slow), (60, 128)])
def test_a_run_that_loses_half_of_its_gain_is_found(steps: int, prompts: int) -> None:
    rng = np.random.default_rng(4)
    shares = {name: sounded(rewards(rng, curve(at(steps)), prompts)) for name, curve in LOSING.items()}
    assert min(shares.values()) > 0.95, shares


@pytest.mark.parametrize(("steps", "prompts", "gain"), [(60, 64, 0.5), (100, 16, 0.5)])
def test_a_large_gain_lost_suddenly_in_a_short_run_is_found(steps: int, prompts: int, gain: float) -> None:
    """Half of it, in the middle of the run."""
    rng = np.random.default_rng(7)
    t = at(steps)
    curve = 0.25 + gain * np.minimum(t / 0.3, 1) - gain / 2 * (t >= 0.5)
    assert sounded(rewards(rng, curve, prompts)) > 0.9


def test_difficulty_that_drifts_is_seldom_a_loss() -> None:
    """Correlated noise twice as large as that of the rewards, in long runs with a level end."""
    rng = np.random.default_rng(8)
    steps, correlation = 300, 0.8
    drift = np.zeros((RUNS, steps))
    for step in range(1, steps):
        drift[:, step] = correlation * drift[:, step - 1] + rng.normal(0, 0.04 * (1 - correlation**2) ** 0.5, RUNS)
    level = 0.3 + 0.2 * np.minimum(at(steps) / 0.3, 1)
    assert sounded(level + drift + rng.normal(0, 0.047, drift.shape)) < 0.25


def test_the_limit_of_the_evidence_is_exceeded_by_few_runs_without_a_change() -> None:
    """One cell of the calibration in benchmarks/reward_alarm.py."""
    rng = np.random.default_rng(9)
    shares = [sounded(rewards(rng, np.full(60, level))) for level in (0.25, 0.25, 0.5, 0.5)]
    assert np.mean(shares) < 0.01


def test_standard_errors_on_record_are_respected() -> None:
    """Rewards agree by chance from step to step, and the recorded errors show how uncertain each mean is."""
    curve = np.array([LOSING["suddenly"](at(100))])
    assert sounded(curve) == 1
    assert sounded(curve, np.full((1, 100), 0.3**2)) == 0
    assert sounded(curve, np.full((1, 100), 0.03**2)) == 1


def test_the_variance_of_a_step() -> None:
    rng = np.random.default_rng(5)
    white = rng.normal(0, 2, (400, 120)) + np.linspace(0, 3, 120)
    assert step_variance(white).mean() == pytest.approx(4, rel=0.2)
    walk = np.cumsum(rng.normal(0, 1, (400, 12)), axis=1)  # of drifts of 10 steps each
    assert step_variance(np.repeat(walk, 10, axis=1)).mean() > 3 * (np.diff(np.repeat(walk, 10)) ** 2).mean() / 2


def test_a_shift_compares_two_windows() -> None:
    values = np.array([[1.0, 1.2, 0.8, 5.0, 5.1, 4.9, 3.0, 3.2, 2.8, 3.4]])
    found = shift(values, 4)
    assert (found.first[0], found.last[0], found.least[0]) == pytest.approx((2.0, 3.1, 3.1))
    assert shift(values, 3, start=3).first[0] == pytest.approx(5.0)
