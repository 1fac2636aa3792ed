"""A teacher whose likely tokens the student never writes teaches nothing; a short cold start on its answers helps."""

import random
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from lab import Arm, Method, Step
from loop import Loop, policy_loss
from make_chains import BATCH, Task, chain, held_out_questions, questions, right_answer
from results import Panel, Runs

DIGITS, STEPS = 6, 150
SAMPLES = 64  # of a step
IN_LETTERS = str.maketrans("0123456789", "abcdefghij")  # how the other teacher writes a digit
TEACHER_STEPS = 400
COLD_ANSWERS, COLD_STEPS, COLD_RATE = 200, 100, 2e-3  # of the cold start
TOP = 10  # likely tokens of a model that are compared, as many as there are digits


def learn_letters(engine: Loop, task: Task) -> None:
    """Train the student, from the teacher's weights, on right answers in letters to questions in digits."""
    rng = random.Random(task.seed)
    engine.student.load_state_dict(engine.teacher.state_dict())
    for step in range(TEACHER_STEPS):
        asked, answers = zip(*(chain(task, DIGITS, rng) for _ in range(BATCH)), strict=True)
        rate = 3e-3 * (1 - step / TEACHER_STEPS)
        engine.fit(asked, [answer.translate(IN_LETTERS) for answer in answers], rate)


def cold_start(engine: Loop, task: Task, teacher: Any, drawn: random.Random) -> None:
    """Fine-tune the student on sampled answers of the teacher, with the sampled tokens."""
    student, engine.student = engine.student, teacher
    engine.sample(questions(task, COLD_ANSWERS, drawn.randrange(10**9)), DIGITS, greedy=False)
    engine.student, sampled = student, engine.rollout
    ids = torch.cat([sampled.prompts_BP, sampled.answers_BA], dim=1)
    labels = torch.cat([torch.full_like(sampled.prompts_BP, -100), sampled.answers_BA], dim=1)
    for step in range(COLD_STEPS):
        rows = drawn.sample(range(COLD_ANSWERS), BATCH)
        loss = student(input_ids=ids[rows], labels=labels[rows]).loss
        engine.minimise(loss, COLD_RATE * (1 - step / COLD_STEPS))
    engine.new_optimizer()


def measured(engine: Loop, task: Task, arm: Arm) -> dict[str, float]:
    """Measure the accuracy of answers; a right answer may be in digits or in letters."""
    asked = held_out_questions(task)
    answers = engine.sample(asked, arm.length, greedy=True)
    chains = (right_answer(task, question, arm.length) for question in asked)
    right = [answer in (digits, digits.translate(IN_LETTERS)) for answer, digits in zip(answers, chains, strict=True)]
    return {"accuracy": round(sum(right) / len(right), 4)}


def distilled(letters: bool, cold: bool = False) -> Method:
    """Return the method of OPD from a teacher that answers in digits or in letters, with or without a cold start."""

    def begin(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
        teacher = engine.teacher
        if letters:
            first = engine.weights()
            engine.start_from("letters", partial(learn_letters, engine, task))
            teacher = engine.model_of(engine.start)
            engine.student.load_state_dict(first)
            engine.new_optimizer()
        if cold:
            cold_start(engine, task, teacher, drawn)
        rates = arm.rates()

        def step() -> dict[str, float]:
            engine.sample(questions(task, SAMPLES, drawn.randrange(10**9)), arm.length, greedy=False)
            student_BAV = engine.distributions(engine.student)
            with torch.no_grad():
                teacher_BAV = engine.distributions(teacher)
            sides = (side.gather(-1, engine.rollout.answers_BA[..., None]) for side in (student_BAV, teacher_BAV))
            student_BA, teacher_BA = (side[..., 0] for side in sides)
            shared = overlap(student_BAV.detach(), teacher_BAV)
            engine.minimise(policy_loss(student_BA, teacher_BA - student_BA.detach()), next(rates))
            return {"samples": SAMPLES, "tokens": SAMPLES * arm.length, "overlap": shared}

        return step

    return begin


def overlap(student_BAV: torch.Tensor, teacher_BAV: torch.Tensor) -> float:
    """Return the share of the student's `TOP` most likely tokens that are among those of the teacher."""
    tops = (torch.zeros_like(side).scatter(-1, side.topk(TOP).indices, 1.0) for side in (student_BAV, teacher_BAV))
    student, teacher = tops
    return float((student * teacher).sum(-1).mean() / TOP)


METHODS = {
    "same notation": distilled(letters=False),
    "other notation": distilled(letters=True),
    "other, cold start": distilled(letters=True, cold=True),
}
ARMS = {name: Arm(method, STEPS, DIGITS, bar=2.0, measure=measured) for name, method in METHODS.items()}
PANELS = {"chains of 6": Panel(tuple(ARMS)), "likely tokens": Panel(tuple(ARMS), y="overlap")}


def figures(runs: Runs) -> dict[str, float]:
    """Return medians over the seeds: first and best accuracy, their difference, first and last overlap."""
    found: dict[str, float] = {}
    for arm in ARMS:
        firsts = [values[0] for values in runs.series(arm, "accuracy")]
        found[f"{arm} first accuracy"] = median(firsts)
        found[f"{arm} best accuracy"] = median(runs.best(arm))
        gains = (best - first for best, first in zip(runs.best(arm), firsts, strict=True))
        found[f"{arm} gain"] = round(median(gains), 4)
        found[f"{arm} first overlap"] = round(median(values[0] for values in runs.series(arm, "overlap")), 3)
        found[f"{arm} last overlap"] = round(median(runs.last(arm, "overlap")), 3)
    return found


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    return {
        "other notation: an overlap below 0.6": found["other notation first overlap"] < 0.6,
        "other notation: a gain below 0.1": found["other notation gain"] < 0.1,
        "cold start: an overlap above 0.9": found["other, cold start first overlap"] > 0.9,
        "cold start: a gain of at least 0.6": found["other, cold start gain"] >= 0.6,
        "same notation: a gain of at least 0.6": found["same notation gain"] >= 0.6,
    }


def findings(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities that benchmarks/claims.md states."""
    other, cold = "other notation", "other, cold start"
    return {
        "other notation: an overlap below 0.6": found[f"{other} first overlap"] < 0.6,
        "the cold start raises the overlap": found[f"{cold} first overlap"] > found[f"{other} first overlap"],
        "other notation: a gain below 0.1, with and without a cold start": (
            max(found[f"{other} gain"], found[f"{cold} gain"]) < 0.1
        ),
        "same notation: a gain of at least 0.1": found["same notation gain"] >= 0.1,
    }
