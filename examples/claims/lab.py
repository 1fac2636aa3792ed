"""Training runs of the claims: arms, signals, and curves of validation accuracy.

An arm is a signal, a difficulty and a number of steps. All arms of a claim start from the same student and have the
same questions, batch, optimizer and learning rate; they differ in the signal. Legend: B answers, T tokens of an answer.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from make_chains import Task, held_out_questions, questions, right_answer

# (student log-probs f32 [B, T], teacher log-probs f32 [B, T], rewards f32 [B]) -> advantages f32 [B, T]
Signal = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

EVERY = 1.1  # validations come at steps that grow by this factor
ANSWERS = 4  # samples of a question, next to each other in a batch
QUESTIONS = 32  # of a step


@dataclass(frozen=True)
class Arm:
    """A line of a plot: a signal at a difficulty. It ends at `steps`, or earlier at the first accuracy of `bar`."""

    signal: Signal
    length: int
    steps: int
    bar: float = 0.8
    learning_rate: float = 2e-3


def teacher(student: np.ndarray, scored: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """On-policy distillation: the advantage of a token is teacher minus student log-prob."""
    return scored - student


def reward(student: np.ndarray, scored: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """GRPO: the reward, normalised over the answers to a question. arXiv 2402.03300."""
    groups = rewards.reshape(-1, ANSWERS)
    normalised = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    return np.broadcast_to(normalised.reshape(-1, 1), student.shape).astype(np.float32)


class Engine(Protocol):
    """A student, a teacher and an optimizer."""

    def reset(self, seed: int) -> None:
        """Start again from the first student, with a new optimizer."""

    def sample(self, asked: list[str], length: int, greedy: bool) -> list[str]:
        """Return an answer of `length` digits to each question."""

    def update(self, signal: Signal, rewards: np.ndarray, learning_rate: float) -> None:
        """Make one optimizer step on the answers of the last `sample`."""


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
    run, begin = Run(name, seed), time.perf_counter()
    engine.reset(seed)
    drawn = random.Random(seed)
    tokens, step = 0, 0
    for stop in (0, *validation_steps(arm.steps)):
        rewards: list[float] = []
        while step < stop:
            asked = [question for question in questions(QUESTIONS, drawn.randrange(10**9)) for _ in range(ANSWERS)]
            answers = engine.sample(asked, arm.length, greedy=False)
            right = graded(task, asked, answers, arm.length)
            engine.update(arm.signal, right, arm.learning_rate)
            rewards.append(float(right.mean()))
            tokens, step = tokens + len(asked) * arm.length, step + 1
        run.curve.append({"step": step, "tokens": tokens, "accuracy": accuracy(engine, task, arm.length)})
        if rewards:
            run.curve[-1]["reward"] = round(sum(rewards) / len(rewards), 4)
        run.seconds = round(time.perf_counter() - begin, 1)
        run.finished = run.curve[-1]["accuracy"] >= arm.bar or step == arm.steps
        yield run
        if run.finished:
            return


def accuracy(engine: Engine, task: Task, length: int) -> float:
    """Return the share of right greedy answers to held-out questions."""
    asked = held_out_questions()
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
