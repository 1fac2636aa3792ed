"""A teacher's preference against rewards: simulated teachers, and a naive regression."""

import numpy as np
import pytest

from roll_opd.teachers.logprob_checks import preference_check, standard_errors

GROUPS, SIZE = 32, 2


def simulated(rng: np.random.Generator, slope: float) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return gaps, rewards and groups; samples of one group have an offset in common."""
    groups = [str(number // SIZE) for number in range(GROUPS * SIZE)]
    rewards = (rng.random(GROUPS)[:, None] > rng.random((GROUPS, SIZE))).astype(float).ravel()
    offsets = np.repeat(rng.standard_normal(GROUPS), SIZE)
    return slope * rewards + offsets + 0.5 * rng.standard_normal(len(rewards)), rewards, groups


def naive(gaps: np.ndarray, rewards: np.ndarray, groups: list[str]) -> float:
    """Least squares with a sandwich of sums over groups, by matrices."""
    design = np.column_stack([np.ones(len(rewards)), rewards])
    bread = np.linalg.inv(design.T @ design)
    beta = bread @ design.T @ gaps
    meat = np.zeros((2, 2))
    for group in set(groups):
        rows = np.array(groups) == group
        score = design[rows].T @ (gaps - design @ beta)[rows]
        meat += np.outer(score, score)
    count = len(set(groups))
    return float(beta[1] / np.sqrt((bread @ meat @ bread)[1, 1] * count / (count - 1)))


def test_standard_errors_are_those_of_a_regression() -> None:
    for seed in range(20):
        given = simulated(np.random.default_rng(seed), slope=0.3)
        assert standard_errors(*given) == pytest.approx(naive(*given))


def test_teachers_without_a_preference_give_no_warning() -> None:
    verdicts = [preference_check(*simulated(np.random.default_rng(seed), 0.0)).verdict for seed in range(1000)]
    assert verdicts.count("warning") <= 5


def test_a_teacher_that_prefers_losing_gives_a_warning() -> None:
    verdicts = [preference_check(*simulated(np.random.default_rng(seed), -2.0)).verdict for seed in range(200)]
    assert verdicts.count("warning") >= 190
    rising = [preference_check(*simulated(np.random.default_rng(seed), 2.0)).verdict for seed in range(200)]
    assert set(rising) == {"ok"}


def test_nothing_is_judged_without_a_difference() -> None:
    groups = [str(number) for number in range(40)]
    assert preference_check(np.arange(40.0), np.ones(40), groups).value == "all rewards are 1"
    rewards = np.arange(40.0) % 2
    assert preference_check(np.zeros(40), rewards, groups).verdict == "ok"  # the student itself
    assert preference_check(-rewards[:8], rewards[:8], groups[:8]).verdict == "ok"  # too few prompts
