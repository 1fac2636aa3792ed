"""Distillation from the earlier self recovers a skill that fine-tuning on new facts has damaged; the facts remain."""

import random
import string
from collections.abc import Mapping
from statistics import median

from lab import Arm, Method, Step, accuracy, on_policy, supervised, teacher
from loop import Loop
from make_chains import Task
from results import Panel, Runs

LENGTH, STEPS = 8, 200
FACTS, FACT_LENGTH = 32, 4
FACT_STEPS, FACT_RATE = 400, 1e-3
RATE = 5e-4


def book() -> dict[str, str]:
    """Return the facts: random answers of four digits to questions of three capitals."""
    rng = random.Random(0)
    facts: dict[str, str] = {}
    while len(facts) < FACTS:
        facts["".join(rng.choices(string.ascii_uppercase, k=3))] = "".join(rng.choices(string.digits, k=FACT_LENGTH))
    return facts


def old_self(engine: Loop) -> None:
    """Make the teacher the student."""
    engine.student.load_state_dict(engine.teacher.state_dict())
    engine.new_optimizer()


def fine_tune(engine: Loop) -> None:
    """Fine-tune the teacher on the facts."""
    old_self(engine)
    for step in range(FACT_STEPS):
        engine.fit(list(book()), list(book().values()), FACT_RATE * (1 - step / FACT_STEPS))


def after_facts(method: Method) -> Method:
    """Return the method that fine-tunes on the facts before its first step."""

    def begin(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
        engine.start_from("facts", lambda: fine_tune(engine))
        return method(engine, task, arm, drawn)

    return begin


def before(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
    """Measure the earlier self and do not train."""
    old_self(engine)
    return lambda: {"samples": 0, "tokens": 0}


def both(engine: Loop, task: Task, arm: Arm) -> dict[str, float]:
    """Measure the accuracies of chains and facts."""
    answers = engine.sample(list(book()), FACT_LENGTH, greedy=True)
    known = sum(a == b for a, b in zip(answers, book().values(), strict=True))
    return {"accuracy": accuracy(engine, task, arm.length), "facts": round(known / FACTS, 4)}


OPD, REPLAY, BEFORE = "OPD from the earlier self", "SFT on chains", "earlier self"
NEVER = 2.0  # accuracy at which an arm ends: all arms have the same samples
METHODS = {OPD: after_facts(on_policy(teacher)), REPLAY: after_facts(supervised())}
ARMS = {
    **{name: Arm(method, STEPS, LENGTH, NEVER, RATE, decay=True, measure=both) for name, method in METHODS.items()},
    BEFORE: Arm(before, 1, LENGTH, NEVER, measure=both),
}
PANELS = {"chains": Panel((OPD, REPLAY)), "facts": Panel((OPD, REPLAY), "facts")}


def figures(runs: Runs) -> dict[str, float]:
    """Return the median accuracies of chains and facts, before, after fine-tuning and at the end."""
    found = {"chains before": median(runs.last(BEFORE))}
    for name, key in (("chains", "accuracy"), ("facts", "facts")):
        found[f"{name} after fine-tuning"] = median(values[0] for values in runs.series(OPD, key))
        found |= {f"{name}, {arm}": median(runs.last(arm, key)) for arm in ARMS if arm != BEFORE}
    return found


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    chains, facts = found["chains before"] or 1.0, found["facts after fine-tuning"] or 1.0
    recovered = {method: found[f"chains, {method}"] / chains >= 0.97 for method in METHODS}
    kept = {method: found[f"facts, {method}"] / facts >= 0.95 for method in METHODS}
    return {
        "fine-tuning takes at least half of the chains": found["chains after fine-tuning"] <= chains / 2,
        "OPD recovers 0.97 of the chains": recovered[OPD],
        "OPD keeps 0.95 of the facts": kept[OPD],
        "SFT on chains is worse in one of them": not (recovered[REPLAY] and kept[REPLAY]),
    }


def findings(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities that benchmarks/claims.md states."""
    known, after = found["facts after fine-tuning"], "after fine-tuning"
    return {
        "fine-tuning takes at least half of the chains": found[f"chains {after}"] <= found["chains before"] / 2,
        "both methods lose nine tenths of the facts": max(found[f"facts, {name}"] for name in METHODS) <= known / 10,
        "SFT recovers more of the chains than OPD": found[f"chains, {REPLAY}"] > found[f"chains, {OPD}"],
    }
