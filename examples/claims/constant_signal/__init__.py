"""Without a teacher a constant negative advantage teaches nothing here: the gate for all other claims."""

from collections.abc import Mapping
from statistics import median

import numpy as np
from lab import Arm, Signal, on_policy, teacher
from results import Panel, Runs

LENGTH, STEPS = 8, 150
HALF = float(np.log(0.5))


def constant(student: np.ndarray, scored: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Return -1 for every token."""
    return np.full_like(student, -1.0)


def student_unlikely(student: np.ndarray, scored: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Return -1 for the tokens to which the student gives less than a half, else 0; the teacher has no part."""
    return -(student < HALF).astype(np.float32)


SIGNALS: dict[str, Signal] = {"-1": constant, "-1, student unlikely": student_unlikely, "OPD": teacher}
ARMS = {name: Arm(on_policy(signal), STEPS, LENGTH) for name, signal in SIGNALS.items()}
PANELS = {f"chains of {LENGTH}": Panel(tuple(ARMS))}


def figures(runs: Runs) -> dict[str, float]:
    """Return the median over the seeds of each arm's best accuracy."""
    return {f"{arm} accuracy": median(runs.best(arm)) for arm in ARMS}


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    return {
        "-1 everywhere stays below 0.1": found["-1 accuracy"] < 0.1,
        "-1 where the student is unlikely stays below 0.1": found["-1, student unlikely accuracy"] < 0.1,
    }


def findings(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities that benchmarks/claims.md states."""
    constants = [accuracy for name, accuracy in found.items() if not name.startswith("OPD")]
    return {
        "both constant signals stay below an accuracy of 0.1": max(constants) < 0.1,
        "OPD reaches more than both": found["OPD accuracy"] > max(constants),
    }
