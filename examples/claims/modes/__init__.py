"""Reverse KL chooses one of two right rules and forward KL covers both, in a student that is too small for both."""

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from lab import SAMPLES, Arm, Method, Step, pretrain
from loop import Loop, policy_loss
from make_assets import new_model
from make_chains import SHAPE, Task, held_out_questions, questions, right_answer, second
from results import Panel, Runs

LENGTH, STEPS, RATE = 3, 400, 2e-3
TEACHER_STEPS, TEACHER_RATE = 400, 3e-3
START_STEPS, START_RATE = 500, 4e-3
SMALL = SHAPE | {"num_hidden_layers": 1}
QUESTIONS, TRIES = 50, 8  # of a validation; answers to each question
NEVER = 2.0  # accuracy at which an arm ends: all arms have the same samples


def rules(task: Task) -> tuple[Task, Task]:
    """Return the two right rules, both in digits."""
    return task, replace(second(task), alphabet=task.alphabet)


def prepared(engine: Loop, task: Task) -> Any:
    """Make the student a small model that has seen both rules; return a teacher that follows each in a half."""
    chains = [(rule, True) for rule in rules(task)]
    engine.student.load_state_dict(engine.teacher.state_dict())
    engine.start_from("teacher", partial(pretrain, engine, chains, TEACHER_STEPS, TEACHER_RATE))
    teacher = engine.model_of(engine.start)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        engine.student = new_model(engine.tokenizer, SMALL)
    engine.new_optimizer()
    engine.start_from("student", partial(pretrain, engine, chains, START_STEPS, START_RATE))
    return teacher


def reverse(engine: Loop, teacher: Any, asked: list[str], length: int) -> torch.Tensor:
    """Return the policy loss of reverse KL on the student's answers."""
    engine.sample(asked, length, greedy=False)
    student_BA = engine.logprobs(engine.student)
    with torch.no_grad():
        teacher_BA = engine.logprobs(teacher)
    return policy_loss(student_BA, teacher_BA - student_BA.detach())


def forward(engine: Loop, teacher: Any, asked: list[str], length: int) -> torch.Tensor:
    """Return the forward KL on the teacher's answers, without the teacher's entropy, which has no gradient."""
    student, engine.student = engine.student, teacher
    engine.sample(asked, length, greedy=False)
    engine.student = student
    return -engine.logprobs(student).mean()


def distilled(loss: Any) -> Method:
    """Return the method that minimises a loss between the teacher of both rules and the small student."""

    def begin(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
        teacher, rates = prepared(engine, task), arm.rates()

        def step() -> dict[str, float]:
            asked = questions(task, SAMPLES, drawn.randrange(10**9))
            engine.minimise(loss(engine, teacher, asked, arm.length), next(rates))
            return {"samples": SAMPLES, "tokens": SAMPLES * arm.length}

        return step

    return begin


def teacher_itself(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
    """Measure the teacher and do not train."""
    engine.student = prepared(engine, task)
    return lambda: {"samples": 0, "tokens": 0}


def measured(engine: Loop, task: Task, arm: Arm) -> dict[str, float]:
    """Measure samples at temperature 1.

    "accuracy" is the share of samples that follow one of the rules from the first to the last digit, and "pass@8" the
    share of pairs of a question and a rule whose answer is among eight samples. "main rule" is the share of the more
    frequent rule among the right samples.
    """
    asked = [question for question in held_out_questions(task)[:QUESTIONS] for _ in range(TRIES)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        answers = engine.sample(asked, arm.length, greedy=False)
    pairs = zip(asked, answers, strict=True)
    right = torch.tensor([[answer == right_answer(rule, q, arm.length) for rule in rules(task)] for q, answer in pairs])
    each = right.float().mean(0)
    return {
        "accuracy": round(float(right.any(1).float().mean()), 4),
        "pass@8": round(float(right.reshape(-1, TRIES, 2).any(1).float().mean()), 4),
        "main rule": round(float(each.max() / each.sum().clamp_min(1e-9)), 4),
    }


METHODS: dict[str, Method] = {"reverse": distilled(reverse), "forward": distilled(forward)}
ARMS = {
    **{name: Arm(method, STEPS, LENGTH, NEVER, RATE, decay=True, measure=measured) for name, method in METHODS.items()},
    "teacher": Arm(teacher_itself, 1, LENGTH, NEVER, measure=measured),
}
PANELS = {
    "right by one of the rules": Panel(tuple(METHODS)),
    "both rules": Panel(tuple(METHODS), "pass@8"),
}


def figures(runs: Runs) -> dict[str, float]:
    """Return the medians over the seeds of each arm's last measurements, and of the first ones."""
    keys = ("accuracy", "pass@8", "main rule")
    found = {f"start {key}": median(values[0] for values in runs.series("reverse", key)) for key in keys}
    return found | {f"{arm} {key}": median(runs.last(arm, key)) for arm in ARMS for key in keys}


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    return {
        "reverse: nine of ten right answers follow one rule": found["reverse main rule"] >= 0.9,
        "forward: each rule has at least a quarter of the right answers": found["forward main rule"] <= 0.75,
        "reverse has the higher accuracy": found["reverse accuracy"] > found["forward accuracy"],
        "forward has the higher pass@8 of both rules": found["forward pass@8"] > found["reverse pass@8"],
    }


def findings(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities that benchmarks/claims.md states."""
    return {
        "the share of the main rule rises with reverse KL and falls with forward KL": (
            found["reverse main rule"] > found["start main rule"] > found["forward main rule"]
        ),
        "reverse has the higher accuracy": found["reverse accuracy"] > found["forward accuracy"],
        "forward has the higher pass@8 of both rules": found["forward pass@8"] > found["reverse pass@8"],
    }
