"""Whether a teacher prefers the samples that the reward prefers.

A teacher that is worse than the student at the task pulls it towards the wrong samples. Legend: S samples.
"""

from collections.abc import Sequence

import numpy as np

from roll_opd.teachers.teacher_checks import Check

SIGNIFICANT = 3.0  # standard errors
FEWEST_GROUPS = 16  # prompts: standard errors over fewer are too small
NAME = "agrees with the reward"


def standard_errors(gaps: np.ndarray, rewards: np.ndarray, groups: Sequence[str]) -> float:
    """Return the slope of `gaps` [S] over `rewards` [S] in its standard errors, which are robust to groups; 0: flat.

    Samples of one group are dependent, so their residuals are summed first (Liang and Zeger 1986).
    """
    numbers = np.unique(np.asarray(groups), return_inverse=True)[1]
    count = int(numbers.max()) + 1
    centred = rewards - rewards.mean()
    square = float(centred @ centred)
    if square == 0 or count < 2:
        return 0.0
    slope = float(centred @ gaps) / square
    residuals = gaps - gaps.mean() - slope * centred
    sums = np.bincount(numbers, weights=centred * residuals)
    error = np.sqrt(float(sums @ sums) * count / (count - 1)) / square
    return slope / error if error > 0 else 0.0


def preference_check(gaps: np.ndarray, rewards: np.ndarray, groups: Sequence[str]) -> Check:
    """Return the verdict on teacher minus student log-prob, mean a token of each sample, against its reward.

    A warning where the teacher significantly prefers the samples of lower reward.
    """
    if np.ptp(rewards) == 0:
        return Check(NAME, f"all rewards are {rewards[0]:g}", "ok", "not judged: no sample has a higher reward")
    better = rewards > rewards.mean()
    errors = standard_errors(gaps, rewards, groups)
    value = f"{gaps[better].mean():+.2f} against {gaps[~better].mean():+.2f}, {errors:+.1f} std errors"
    if len(set(groups)) >= FEWEST_GROUPS and errors < -SIGNIFICANT:
        return Check(
            NAME,
            value,
            "warning",
            "measured against the student, the teacher prefers the samples with the lower reward: it is no better than"
            " the student at this task, has lost layers, or reads something else; measure how well it does"
            " (validation.measure_teacher)",
        )
    meaning = "teacher minus student log-prob a token, samples with a reward above the mean against the others"
    return Check(NAME, value, "ok", meaning)
