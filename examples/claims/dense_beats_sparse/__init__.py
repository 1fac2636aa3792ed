"""A dense signal needs at most a fifth of the steps of a sparse reward, and less the longer the answer is."""

from collections.abc import Mapping
from statistics import median

from lab import Arm, on_policy, reward, teacher
from results import Panel, Runs

LENGTHS = (4, 8)
RATES = {"": 2e-3, ", rate 5e-4": 5e-4}  # of GRPO; OPD has the first
ARMS = {
    name: arm
    for length in LENGTHS
    for name, arm in {
        f"OPD {length}": Arm(on_policy(teacher), 300, length),
        **{f"GRPO {length}{n}": Arm(on_policy(reward), 500, length, learning_rate=rate) for n, rate in RATES.items()},
    }.items()
}
PANELS = {
    f"chains of {length}": Panel(tuple(arm for arm in ARMS if f" {length}" in arm.split(",")[0])) for length in LENGTHS
}


def figures(runs: Runs) -> dict[str, float]:
    """Return for each length the median steps to the bar, their ratio, and the best accuracies.

    GRPO counts with the better of its learning rates. An arm that does not reach the bar counts with its last step, so
    its ratio is a lower bound.
    """
    found: dict[str, float] = {}
    for length in LENGTHS:
        rates = [f"GRPO {length}{name}" for name in RATES]
        steps = {"OPD": median(runs.steps_to_bar(f"OPD {length}"))}
        steps["GRPO"] = min(median(runs.steps_to_bar(arm)) for arm in rates)
        found |= {f"{name} {length} steps": value for name, value in steps.items()}
        found[f"ratio {length}"] = round(steps["GRPO"] / steps["OPD"], 1)
        found[f"OPD {length} accuracy"] = median(runs.best(f"OPD {length}"))
        found[f"GRPO {length} accuracy"] = max(median(runs.best(arm)) for arm in rates)
    return found


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    longest = max(LENGTHS)
    return {
        "OPD reaches the bar at every length": all(found[f"OPD {length} accuracy"] >= 0.8 for length in LENGTHS),
        "ratio at least 5 at every length": min(found[f"ratio {length}"] for length in LENGTHS) >= 5,
        "GRPO stays below 0.1 at the longest chains": found[f"GRPO {longest} accuracy"] < 0.1,
    }
