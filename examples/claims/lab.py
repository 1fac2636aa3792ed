"""Training runs of the claims: arms, methods, signals, and curves of validation accuracy.

An arm is a method, a difficulty and a number of steps. All arms of a claim start from the same student and have the
same questions, batch, optimizer and learning rate, except where the claim states a difference. Legend: Q questions,
N answers to each, B = Q * N answers, T tokens of an answer.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from make_chains import SHORT, Task, chain, held_out_questions, questions, right_answer

# (student log-probs f32 [B, T], teacher log-probs f32 [B, T], rewards f32 [Q, N]) -> advantages f32 [B, T]
Signal = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Step = Callable[[], dict[str, float]]  # makes one optimizer step; returns "samples", "tokens" and measurements

EVERY = 1.1  # validations come at steps that grow by this factor
SAMPLES = 128  # of a step
ANSWERS = 4  # to a question, next to each other in a batch
SUMS = ("samples", "tokens")  # added up over a run; other measurements are averaged between validations


class Engine(Protocol):
    """A student, a teacher and an optimizer."""

    def reset(self, seed: int) -> None:
        """Start again from the first student, with a new optimizer."""

    def sample(self, asked: list[str], length: int, greedy: bool) -> list[str]:
        """Return an answer of `length` digits to each question."""

    def update(self, signal: Signal, rewards: np.ndarray, learning_rate: float) -> None:
        """Make one optimizer step on the answers of the last `sample`."""


@dataclass(frozen=True)
class Arm:
    """A line of a plot. It ends at `steps`, or earlier at the first accuracy of `bar`."""

    method: "Method"
    steps: int
    length: int = 8
    bar: float = 0.8
    learning_rate: float = 2e-3
    decay: bool = False  # linear, to 0 at the last step
    measure: "Measure" = lambda engine, task, arm: {"accuracy": accuracy(engine, task, arm.length)}
    seeds: int | None = None  # an arm of a search runs with the first seeds only

    def rates(self) -> "Iterator[float]":
        """Yield the learning rate of each step."""
        for step in range(self.steps):
            yield self.learning_rate * (1 - step / self.steps if self.decay else 1)


# (engine, task, arm, random numbers of the run) -> step. It prepares the engine; state is kept in the step's closure.
Method = Callable[[Any, Task, Arm, random.Random], Step]
# (engine, task, arm) -> measurements of a validation; "accuracy" is one of them
Measure = Callable[[Any, Task, Arm], dict[str, float]]


def on_policy(signal: Signal, answers: int = ANSWERS, pool: int | None = None) -> Method:
    """Return the method that trains on the student's answers with the advantages of a signal.

    The questions are drawn from all training questions, or from `pool` of them.
    """

    def begin(engine: Engine, task: Task, arm: Arm, drawn: random.Random) -> Step:
        rates, draw = arm.rates(), drawing(task, drawn, pool)

        def step() -> dict[str, float]:
            asked = [question for question in draw(SAMPLES // answers) for _ in range(answers)]
            right = graded(task, asked, engine.sample(asked, arm.length, greedy=False), arm.length)
            engine.update(signal, right.reshape(-1, answers), next(rates))
            return {"samples": len(asked), "tokens": len(asked) * arm.length, "reward": float(right.mean())}

        return step

    return begin


def supervised(pool: int | None = None) -> Method:
    """Return the method of supervised fine-tuning on right answers, with as many tokens in a step as `on_policy`."""

    def begin(engine: Any, task: Task, arm: Arm, drawn: random.Random) -> Step:
        rates, draw = arm.rates(), drawing(task, drawn, pool)

        def step() -> dict[str, float]:
            asked = draw(SAMPLES)
            engine.fit(asked, [right_answer(task, question, arm.length) for question in asked], next(rates))
            return {"samples": len(asked), "tokens": len(asked) * arm.length}

        return step

    return begin


def drawing(task: Task, drawn: random.Random, pool: int | None = None) -> Callable[[int], list[str]]:
    """Return a function that draws so many training questions, from a pool of so many if it is given."""
    if pool is None:
        return lambda count: questions(task, count, drawn.randrange(10**9))
    few = questions(task, pool, drawn.randrange(10**9))
    return lambda count: drawn.choices(few, k=count)


def pretrain(engine: Any, skills: Sequence[tuple[Task, bool]], steps: int, learning_rate: float = 2e-3) -> None:
    """Train on random chains of several tasks; where a task's flag is false, a random digit stands for a wrap."""
    rng = random.Random(0)
    for step in range(steps):
        rows = [chain(task, SHORT, rng, known) for task, known in skills for _ in range(SAMPLES // len(skills))]
        engine.fit(*zip(*rows, strict=True), learning_rate * (1 - step / steps))


def teacher(student: np.ndarray, scored: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """On-policy distillation: the advantage of a token is teacher minus student log-prob."""
    return scored - student


def reward(student: np.ndarray, scored: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """GRPO: the reward, normalised over the answers to a question. arXiv 2402.03300."""
    normalised = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    return np.broadcast_to(normalised.reshape(-1, 1), student.shape).astype(np.float32)


@dataclass
class Run:
    """An arm with a seed: `curve` has a row for each validation."""

    arm: str
    seed: int
    curve: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    finished: bool = False


def train(engine: Engine, task: Task, name: str, arm: Arm, seed: int) -> Iterator[Run]:
    """Train an arm; yield the run before the first step and after each validation."""
    run, begin = Run(name, seed), time.process_time()
    engine.reset(seed)
    one_step = arm.method(engine, task, arm, random.Random(seed))
    step, sums = 0, dict.fromkeys(SUMS, 0)
    for stop in (0, *validation_steps(arm.steps)):
        since: Counter[str] = Counter()
        before = step
        for step in range(before + 1, stop + 1):  # noqa: B007 - the number of the last step
            since.update(one_step())
        sums = {key: sums[key] + int(since[key]) for key in SUMS}
        means = {key: round(value / (step - before), 4) for key, value in since.items() if key not in SUMS}
        run.curve.append({"step": step, **sums, **arm.measure(engine, task, arm), **means})
        run.seconds = round(time.process_time() - begin, 1)
        run.finished = run.curve[-1]["accuracy"] >= arm.bar or step == arm.steps
        yield run
        if run.finished:
            return


def accuracy(engine: Engine, task: Task, length: int) -> float:
    """Return the share of right greedy answers to held-out questions."""
    asked = held_out_questions(task)
    return round(float(graded(task, asked, engine.sample(asked, length, greedy=True), length).mean()), 4)


def graded(task: Task, asked: list[str], answers: list[str], length: int) -> np.ndarray:
    """Return 1 for each right answer, else 0, f32 [B]."""
    pairs = zip(asked, answers, strict=True)
    return np.array([answer == right_answer(task, question, length) for question, answer in pairs], np.float32)


def validation_steps(last: int) -> list[int]:
    """Return 1, 2, ... and then steps that grow by `EVERY`, up to `last`."""
    steps, step = [], 1.0
    while round(step) < last:
        steps.append(round(step))
        step = max(step + 1, step * EVERY)
    return [*steps, last]
