"""A dense signal needs at most a fifth of the steps of a sparse reward."""

from collections.abc import Mapping
from statistics import median

from lab import Arm, reward, teacher
from results import Runs

STEPS = {8: 500}  # difficulty -> most steps of GRPO
ARMS = {
    name: arm
    for length, steps in STEPS.items()
    for name, arm in (
        (f"OPD {length}", Arm(teacher, length, steps=150)),
        (f"GRPO {length}", Arm(reward, length, steps)),
    )
}
PANELS = {f"chains of {length}": (f"OPD {length}", f"GRPO {length}") for length in STEPS}


def figures(runs: Runs) -> dict[str, float]:
    """Return the median steps to the bar, their ratio, the best accuracies, and GRPO's mean reward.

    An arm that does not reach the bar counts with its last step, so its ratio is a lower bound.
    """
    found: dict[str, float] = {}
    for length in STEPS:
        opd, grpo = (median(runs.steps_to_bar(f"{name} {length}")) for name in ("OPD", "GRPO"))
        found |= {f"OPD {length} steps": opd, f"GRPO {length} steps": grpo, f"ratio {length}": round(grpo / opd, 1)}
        found |= {f"{name} {length} accuracy": median(runs.best(f"{name} {length}")) for name in ("OPD", "GRPO")}
        found[f"GRPO {length} reward"] = median(runs.mean_reward(f"GRPO {length}"))
    return found


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    ratios = [found[f"ratio {length}"] for length in STEPS]
    return {
        "OPD reaches the bar at every length": all(found[f"OPD {length} accuracy"] >= 0.8 for length in STEPS),
        "ratio at least 5 at every length": min(ratios) >= 5,
        "GRPO stays below 0.1 at the longest chains": found[f"GRPO {max(STEPS)} accuracy"] < 0.1,
    }
