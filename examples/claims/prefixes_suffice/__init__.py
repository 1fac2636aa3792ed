"""The first 30 % of an answer's tokens teach as much as all of them, the last 30 % much less."""

from collections.abc import Mapping
from statistics import median

import numpy as np
from lab import Arm, Signal, on_policy, teacher
from results import Panel, Runs

LENGTH, STEPS = 10, 150
NEVER = 2.0  # accuracy at which an arm ends: all arms have the same samples
PARTS = {"all": (0, 10), "first 30 %": (0, 3), "last 30 %": (7, 10)}


def part(first: int, end: int) -> Signal:
    """Return distillation of the tokens from `first` to before `end`; the others have the advantage 0."""

    def signal(student: np.ndarray, scored: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        advantages = teacher(student, scored, rewards)
        advantages[:, :first] = advantages[:, end:] = 0
        return advantages

    return signal


ARMS = {name: Arm(on_policy(part(*tokens)), STEPS, LENGTH, NEVER, decay=True) for name, tokens in PARTS.items()}
PANELS = {f"chains of {LENGTH}": Panel(tuple(ARMS))}


def figures(runs: Runs) -> dict[str, float]:
    """Return the median over the seeds of each arm's last accuracy."""
    return {f"{arm} accuracy": median(runs.last(arm)) for arm in ARMS}


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    complete = found["all accuracy"]
    return {
        "first 30 % within 0.02 of all": found["first 30 % accuracy"] >= complete - 0.02,
        "last 30 % gain less than a third of all": found["last 30 % accuracy"] < complete / 3,
    }


def findings(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities that benchmarks/claims.md states."""
    parts = (found["first 30 % accuracy"], found["last 30 % accuracy"])
    return {"first and last 30 % gain at most 0.6 of all": max(parts) <= 0.6 * found["all accuracy"]}
