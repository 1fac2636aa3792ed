"""A dense signal needs at most a fifth of the steps of a sparse reward, and less the longer the answer is."""

from collections.abc import Mapping, Sequence
from statistics import median

from lab import Arm, on_policy, reward, teacher
from results import Panel, Runs

LENGTHS = (2, 4, 8)
RATE = 5e-4  # GRPO learns with it and not with four times as much
STEPS = {"OPD": {2: 500, 4: 500, 8: 500}, "GRPO": {2: 1000, 4: 1000, 8: 1500}}  # at most, by length
SIGNALS = {"OPD": teacher, "GRPO": reward}
ARMS = {
    f"{name} {length}": Arm(on_policy(signal), STEPS[name][length], length, learning_rate=RATE)
    for length in LENGTHS
    for name, signal in SIGNALS.items()
}
PANELS = {f"chains of {length}": Panel(tuple(f"{name} {length}" for name in SIGNALS)) for length in LENGTHS}


def figures(runs: Runs) -> dict[str, float]:
    """Return for each length the median steps to the bar, their ratio, and the median of the best accuracies.

    An arm that does not reach the bar counts with its last step, so a ratio with GRPO's last step is a lower bound.
    """
    found: dict[str, float] = {}
    for length in LENGTHS:
        for name in SIGNALS:
            found[f"{name} {length} steps"] = median(runs.steps_to_bar(f"{name} {length}"))
            found[f"{name} {length} accuracy"] = median(runs.best(f"{name} {length}"))
        found[f"ratio {length}"] = round(found[f"GRPO {length} steps"] / found[f"OPD {length} steps"], 1)
    return found


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    shortest, middle, longest = LENGTHS
    return {
        "OPD reaches the bar at every length": _is_learned(found, "OPD", LENGTHS),
        "ratio at least 5 at every length": min(found[f"ratio {length}"] for length in LENGTHS) >= 5,
        "the ratio grows with the length": (
            _is_learned(found, "GRPO", (shortest, middle))  # else these ratios are only lower bounds
            and found[f"ratio {shortest}"] < found[f"ratio {middle}"] < found[f"ratio {longest}"]
        ),
        f"GRPO stays below 0.1 at {longest}": found[f"GRPO {longest} accuracy"] < 0.1,
    }


def findings(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities that benchmarks/claims.md states."""
    shortest, *others = LENGTHS
    longest = others[-1]
    return {
        "OPD reaches the bar at every length": _is_learned(found, "OPD", LENGTHS),
        f"the ratio is smallest at {shortest}": (
            _is_learned(found, "GRPO", (shortest,))
            and found[f"ratio {shortest}"] < min(found[f"ratio {length}"] for length in others)
        ),
        f"ratio at least 5 at {longest}": found[f"ratio {longest}"] >= 5,
        f"GRPO stays below 0.1 at {longest}": found[f"GRPO {longest} accuracy"] < 0.1,
    }


def _is_learned(found: Mapping[str, float], name: str, lengths: Sequence[int]) -> bool:
    """Return whether the median of the best accuracies reaches the bar at every one of the lengths."""
    return all(found[f"{name} {length} accuracy"] >= ARMS[f"{name} {length}"].bar for length in lengths)
