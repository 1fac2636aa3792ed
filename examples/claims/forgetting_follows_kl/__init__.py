"""At equal accuracy of a new skill, what an old skill loses follows the KL between the start and the student."""

import random
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from lab import Arm, Method, Step, accuracy, on_policy, pretrain, reward, supervised, teacher
from loop import Loop
from make_chains import Task, held_out_questions, make_batch, right_answer, second
from results import Panel, Runs

LENGTH, STEPS, RATE = 3, 600, 1e-4
BAR = 0.5  # accuracy of the new skill at which an arm ends
OLD_LENGTH = 8  # of the old skill's chains
START_STEPS, TEACHER_STEPS = 400, 200
FORGOTTEN, KL, KL_BACK = "loss of the old skill", "KL(start, now)", "KL(now, start)"


def after_old_skill(method: Method) -> Method:
    """Return the method that starts from a student that knows the old skill, in letters, and no wrap of the new one."""

    def begin(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
        old = (second(task), True)
        start = partial(pretrain, engine, [(task, False), old], START_STEPS)
        engine.start_from("start", start)
        engine.start_from("teacher", partial(pretrain, engine, [(task, True), old], TEACHER_STEPS))
        engine.teacher = engine.model_of(engine.start)
        engine.start_from("start", start)
        return method(engine, task, arm, drawn)

    return begin


@torch.no_grad()
def measured(engine: Loop, task: Task, arm: Arm) -> dict[str, float]:
    """Measure the new skill, the old skill, and KLs of answers to questions of the new skill."""
    asked, start = held_out_questions(task), engine.model_of(engine.start)
    found = {"accuracy": accuracy(engine, task, arm.length)}
    right, nats = old_skill(engine, engine.student, second(task))
    found |= {"old skill": right, FORGOTTEN: round(nats - old_skill(engine, start, second(task))[1], 4)}
    return found | {
        KL: kl(engine, start, engine.student, asked, arm),
        KL_BACK: kl(engine, engine.student, start, asked, arm),
    }


def old_skill(engine: Loop, model: Any, old: Task) -> tuple[float, float]:
    """Return the share of letters that are right after the right letters before, and the cross-entropy of a letter."""
    asked = held_out_questions(old)
    ids, labels = make_batch(
        engine.tokenizer, [(question, right_answer(old, question, OLD_LENGTH)) for question in asked]
    )
    counted, logits = labels[:, 1:] != -100, model(ids).logits[:, :-1]
    wanted, logits = labels[:, 1:][counted], logits[counted]
    right = float((logits.argmax(-1) == wanted).float().mean())
    return round(right, 4), float(torch.nn.functional.cross_entropy(logits, wanted))


def kl(engine: Loop, one: Any, other: Any, asked: list[str], arm: Arm) -> float:
    """Return the KL of an answer, from samples of the first model; the random numbers of the run do not change."""
    student = engine.student
    with torch.random.fork_rng():
        torch.manual_seed(0)
        engine.student = one
        engine.sample(asked, arm.length, greedy=False)
        engine.student = student
    one_BAV, other_BAV = engine.distributions(one), engine.distributions(other)
    return round(float((one_BAV.exp() * (one_BAV - other_BAV)).sum((1, 2)).mean()), 4)


METHODS: dict[str, Method] = {
    "OPD": on_policy(teacher),
    "GRPO": on_policy(reward),
    "SFT": supervised(),
}
ARMS = {
    name: Arm(after_old_skill(method), STEPS, LENGTH, BAR, RATE, measure=measured) for name, method in METHODS.items()
}
PANELS = {
    "new skill": Panel(tuple(ARMS)),
    "old skill, share of letters": Panel(tuple(ARMS), "old skill"),
    "old skill": Panel(tuple(ARMS), FORGOTTEN, KL),
}


def figures(runs: Runs) -> dict[str, float]:
    """Return medians at the end of the runs, and over all runs the rank correlations of forgetting with the two KLs."""
    found: dict[str, float] = {
        "old skill at the start": median(values[0] for values in runs.series("OPD", "old skill"))
    }
    for arm in ARMS:
        found |= {
            f"{arm} {key}": median(runs.last(arm, key)) for key in ("accuracy", "old skill", FORGOTTEN, KL, KL_BACK)
        }
        found[f"{arm} steps"] = median(runs.steps_to_bar(arm))
    for key in (KL, KL_BACK):
        ends = [[value for arm in ARMS for value in runs.last(arm, one)] for one in (FORGOTTEN, key)]
        found[f"correlation with {key}"] = round(rank_correlation(*ends), 2)
    return found


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Return Spearman's rank correlation of values without ties."""
    ranks = np.argsort(np.argsort([one, other], axis=1), axis=1)
    return float(np.corrcoef(ranks)[0, 1])


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""

    def twice(arm: str, key: str) -> bool:
        return found[f"{arm} {key}"] >= 2 * found[f"OPD {key}"]

    return {
        "all methods reach the bar": all(found[f"{arm} accuracy"] >= BAR for arm in ARMS),
        "over all runs, forgetting follows KL(start, now)": found[f"correlation with {KL}"] >= 0.8,
        "SFT: KL(start, now) at least twice that of OPD": twice("SFT", KL),
        "SFT: the old skill loses at least twice as much as with OPD": twice("SFT", FORGOTTEN),
    }


def findings(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities that benchmarks/claims.md states."""
    return {
        "no method keeps half of the old skill": (
            max(found[f"{arm} old skill"] for arm in ARMS) < found["old skill at the start"] / 2
        ),
        "SFT needs the fewest steps": found["SFT steps"] < min(found["OPD steps"], found["GRPO steps"]),
    }
