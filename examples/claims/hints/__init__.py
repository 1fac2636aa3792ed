"""A student that teaches itself learns from a hint that is a rule; a hint that is the right answer teaches less."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from lab import Arm, Method, Step, graded
from loop import Loop, policy_loss
from make_chains import BATCH, Task, chain, prompt_ids, questions, right_answer
from results import Panel, Runs

from roll_opd.extras.alarm.divergence_alarm import AGREEMENT, ENTROPY, REWARD, DivergenceAlarm

DIGITS, STEPS = 6, 200
SAMPLES = 64  # of a step
HINT_STEPS = 450  # in which the first student learns to use hints
AVERAGE = 0.95  # share of the teacher's weights that a step keeps

Hint = Callable[[Task, str], str]  # (task, question) -> the teacher's question


def rule(task: Task, question: str) -> str:
    """Return the question with the letter that stands for the rule."""
    return f"r{question}"


def own_answer(task: Task, question: str) -> str:
    """Return the question with its right answer."""
    return f"{right_answer(task, question, DIGITS)}={question}"


def learn_hints(engine: Loop, task: Task) -> None:
    """Train the student, from the teacher's weights, on questions with and without hints.

    Without a hint a digit is random where the sum wraps. With the rule it is right. An answer in the prompt is copied,
    whether it is right or not.
    """
    rng = random.Random(task.seed)
    engine.student.load_state_dict(engine.teacher.state_dict())
    for step in range(HINT_STEPS):
        kind = step % 3
        chains = [chain(task, DIGITS, rng, wraps_known=kind == 1) for _ in range(BATCH)]
        given = (lambda q, a: q, lambda q, a: f"r{q}", lambda q, a: f"{a}={q}")[kind]
        engine.fit([given(*pair) for pair in chains], [answer for _, answer in chains], 3e-3 * (1 - step / HINT_STEPS))


def hinted(hint: Hint, average: float = 0.0) -> Method:
    """Return the method of OPD from the student itself, whose question has a hint.

    Args:
        average: share of the teacher's weights that a step keeps; with 0 it has the student's weights.
    """

    def begin(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
        engine.start_from("hints", partial(learn_hints, engine, task))
        own = engine.student
        if average:
            own = engine.load(f"{task.name}_student").requires_grad_(False)
            own.load_state_dict(engine.student.state_dict())
        alarm, rates, warnings = DivergenceAlarm(is_itself=True), arm.rates(), list[str]()

        def step() -> dict[str, float]:
            asked = questions(task, SAMPLES, drawn.randrange(10**9))
            right = graded(task, asked, engine.sample(asked, DIGITS, greedy=False), DIGITS)
            student_BAV, rollout = engine.distributions(engine.student), engine.rollout
            prompts = [prompt_ids(engine.tokenizer, hint(task, question)) for question in asked]
            engine.rollout = replace(rollout, prompts_BP=torch.tensor(prompts))
            with torch.no_grad():
                teacher_BAV = engine.distributions(own)
            sides = (side.gather(-1, rollout.answers_BA[..., None])[..., 0] for side in (student_BAV, teacher_BAV))
            student_BA, teacher_BA = sides
            engine.minimise(policy_loss(student_BA, teacher_BA - student_BA.detach()), next(rates))
            if average:
                follow(own, engine.student, average)
            entropy = float(-(student_BAV.detach().exp() * student_BAV.detach()).sum(-1).mean())
            same = float((student_BAV.argmax(-1) == teacher_BAV.argmax(-1)).float().mean())
            warnings.extend(alarm.after({REWARD: float(right.mean()), ENTROPY: entropy, AGREEMENT: same}))
            after = float(bool(warnings))  # the mean over steps is the share of the steps after the first alarm
            return {"samples": SAMPLES, "tokens": SAMPLES * DIGITS, "entropy": entropy, "alarm": after}

        return step

    return begin


@torch.no_grad()
def follow(teacher: Any, student: Any, average: float) -> None:
    """Move the teacher's weights towards the student's, in place."""
    for kept, now in zip(teacher.parameters(), student.parameters(), strict=True):
        kept.lerp_(now, 1 - average)


METHODS = {
    "rule": hinted(rule),
    "rule, average": hinted(rule, AVERAGE),
    "own answer": hinted(own_answer),
    "own answer, average": hinted(own_answer, AVERAGE),
}
ARMS = {name: Arm(method, STEPS, DIGITS, bar=2.0, learning_rate=5e-4) for name, method in METHODS.items()}
PANELS = {"hint for the teacher": Panel(tuple(ARMS)), "student": Panel(tuple(ARMS), y="entropy")}


def figures(runs: Runs) -> dict[str, float]:
    """Return medians over the seeds: best and last accuracy, first and last entropy, and the step of an alarm."""
    found: dict[str, float] = {}
    for arm in ARMS:
        entropies = runs.series(arm, "entropy")
        found[f"{arm} best"] = median(runs.best(arm))
        found[f"{arm} last"] = median(runs.last(arm))
        found[f"{arm} first entropy"] = round(median(values[0] for values in entropies), 3)
        found[f"{arm} last entropy"] = round(median(values[-1] for values in entropies), 3)
        found[f"{arm} alarm"] = median(runs.alarm_steps(arm))
    return found


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    return {
        "rule: accuracy at least 0.9": found["rule best"] >= 0.9,
        "own answer: the accuracy rises and then falls": found["own answer last"] < found["own answer best"] - 0.1,
        "own answer: the entropy falls below a fifth": found["own answer last entropy"]
        < 0.2 * found["own answer first entropy"],
        "own answer: an alarm is given": found["own answer alarm"] <= STEPS,
        "own answer, average: the last accuracy is higher": found["own answer, average last"]
        > found["own answer last"],
    }


def findings(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities that benchmarks/claims.md states."""
    kinds = ("rule", "own answer")
    return {
        "current weights: the accuracy rises and then falls": all(
            found[f"{kind} last"] < found[f"{kind} best"] - 0.1 for kind in kinds
        ),
        "current weights: an alarm is given": max(found[f"{kind} alarm"] for kind in kinds) <= STEPS,
        "current weights: the alarm comes earlier with the rule than with the right answer": found["rule alarm"]
        < found["own answer alarm"],
        "averaged weights reach 0.9": min(found[f"{kind}, average best"] for kind in kinds) >= 0.9,
        "averaged weights: the last accuracy is higher than with current weights": all(
            found[f"{kind}, average last"] > found[f"{kind} last"] for kind in kinds
        ),
    }
