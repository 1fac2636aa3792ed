"""The student's answers teach more than the teacher's answers, and the more so the longer the answer is."""

from collections.abc import Mapping
from statistics import median

from lab import Arm, on_policy, supervised, teacher
from results import Panel, Runs

LENGTHS, STEPS, POOL = (8, 16), 200, 32
NEVER = 2.0  # accuracy at which an arm ends: all arms have the same tokens
ARMS = {
    f"{name} {length}{ending}": Arm(method, STEPS, length, NEVER, decay=True, seeds=seeds)
    for length in LENGTHS
    # with all questions both methods learn the task, so one seed shows that there is no gap
    for ending, pool, seeds in ((f", {POOL} questions", POOL, None), ("", None, 1))
    for name, method in (("OPD", on_policy(teacher, pool=pool)), ("SFT", supervised(pool)))
}
PANELS = {
    f"chains of {length}{ending}": Panel((f"OPD {length}{ending}", f"SFT {length}{ending}"))
    for ending in (f", {POOL} questions", "")
    for length in LENGTHS
}


def figures(runs: Runs) -> dict[str, float]:
    """Return the median of each arm's last accuracy, and OPD minus SFT."""
    found = {f"{arm} accuracy": median(runs.last(arm)) for arm in ARMS}
    for arm in ARMS:
        if arm.startswith("OPD"):
            other = arm.replace("OPD", "SFT")
            found[f"gap {arm[4:]}"] = round(found[f"{arm} accuracy"] - found[f"{other} accuracy"], 4)
    return found


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    short, long = LENGTHS
    few = f", {POOL} questions"
    return {
        f"{POOL} questions: OPD is better at {short}": found[f"gap {short}{few}"] > 0,
        f"{POOL} questions: the gap grows with the length": found[f"gap {long}{few}"] > found[f"gap {short}{few}"],
        f"all questions: OPD is better at {short}": found[f"gap {short}"] > 0,
    }


def findings(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities that benchmarks/claims.md states."""
    few = f", {POOL} questions"
    return {
        f"{POOL} questions: OPD is better at both lengths": min(found[f"gap {length}{few}"] for length in LENGTHS) > 0,
    }
