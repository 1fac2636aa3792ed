"""Two teachers teach one student their tasks; a mixture of rewards and the average of their weights do not."""

import random
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from lab import ANSWERS, SAMPLES, Arm, Method, Step, accuracy, graded, pretrain, reward
from loop import Loop, policy_loss
from make_chains import Task, questions, second
from results import Panel, Runs
from torch import Tensor

LENGTH, STEPS, RATE = 4, 500, 2e-3
START_STEPS, EXPERT_STEPS, START_RATE = 400, 200, 3e-3
NEVER = 2.0  # accuracy at which an arm ends: all arms have the same samples

# (engine with answers of both tasks, the first task in the first half, experts, rewards f32 [Q, N]) -> advantages f32
# [B, A]
Signal = Callable[[Loop, list[Any], Tensor], Tensor]


def learn(engine: Loop, own: Task) -> None:
    """Train the student on right chains of one task."""
    pretrain(engine, [(own, True)], EXPERT_STEPS, START_RATE)


def prepared(engine: Loop, task: Task) -> list[Any]:
    """Load the start, which knows no wrap of either task, into the student; return the experts."""
    both, experts = (task, second(task)), []
    begin = partial(
        engine.start_from,
        "both tasks",
        lambda: pretrain(engine, [(one, False) for one in (*both, both[1])], START_STEPS, START_RATE),
    )
    for one in both:
        begin()
        engine.start_from(one.name, partial(learn, engine, one))
        experts.append(engine.model_of(engine.start))
    begin()
    return experts


@torch.no_grad()
def teachers(engine: Loop, experts: list[Any], rewards: Tensor) -> Tensor:
    """Return teacher minus student log-probs; the teacher of a row is the expert of its task."""
    first_BA, other_BA = map(engine.logprobs, experts)
    half = len(first_BA) // 2
    return torch.cat([first_BA[:half], other_BA[half:]]) - engine.logprobs(engine.student)


def rewarded(engine: Loop, experts: list[Any], rewards: Tensor) -> Tensor:
    """Return the advantages of GRPO."""
    shape = engine.rollout.answers_BA.shape
    zeros = torch.zeros(shape).numpy()
    return torch.tensor(reward(zeros, zeros, rewards.numpy()))


def mixed(signal: Signal) -> Method:
    """Return the method that trains on the student's answers, a half of them to questions of each task."""

    def begin(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
        experts, rates = prepared(engine, task), arm.rates()

        def step() -> dict[str, float]:
            halves = [
                (
                    one,
                    [
                        q
                        for q in questions(one, SAMPLES // ANSWERS // 2, drawn.randrange(10**9))
                        for _ in range(ANSWERS)
                    ],
                )
                for one in (task, second(task))
            ]
            asked = [question for _, rows in halves for question in rows]
            answers = engine.sample(asked, arm.length, greedy=False)
            half = len(asked) // 2
            parts = zip(halves, (answers[:half], answers[half:]), strict=True)
            right = [torch.from_numpy(graded(one, rows, given, arm.length)) for (one, rows), given in parts]
            advantages_BA = signal(engine, experts, torch.cat(right).reshape(-1, ANSWERS))
            engine.minimise(policy_loss(engine.logprobs(engine.student), advantages_BA), next(rates))
            return {"samples": len(asked), "tokens": len(asked) * arm.length, "reward": float(torch.cat(right).mean())}

        return step

    return begin


def fixed(weights: Callable[[list[Any]], dict[str, Tensor]]) -> Method:
    """Return the method that measures weights made from those of the experts and does not train."""

    def begin(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
        engine.student.load_state_dict(weights(prepared(engine, task)))
        return lambda: {"samples": 0, "tokens": 0}

    return begin


def average(experts: list[Any]) -> dict[str, Tensor]:
    """Return the mean of the experts' weights."""
    first, other = (expert.state_dict() for expert in experts)
    return {name: (first[name] + other[name]) / 2 for name in first}


def both(engine: Loop, task: Task, arm: Arm) -> dict[str, float]:
    """Measure the accuracy of each task; "accuracy" is the lower of the two."""
    digits, letters = (accuracy(engine, one, arm.length) for one in (task, second(task)))
    return {"accuracy": min(digits, letters), "digits": digits, "letters": letters}


TRAINED: dict[str, tuple[Method, float]] = {
    "OPD": (mixed(teachers), RATE),
    "GRPO": (mixed(rewarded), RATE / 4),
}
FIXED = {
    "average": fixed(average),
    "digits expert": fixed(lambda experts: experts[0].state_dict()),
    "letters expert": fixed(lambda experts: experts[1].state_dict()),
}
ARMS = {
    **{
        name: Arm(method, STEPS, LENGTH, NEVER, rate, decay=True, measure=both)
        for name, (method, rate) in TRAINED.items()
    },
    **{name: Arm(method, 1, LENGTH, NEVER, measure=both) for name, method in FIXED.items()},
}
PANELS = {"digits": Panel(tuple(TRAINED), "digits"), "letters": Panel(tuple(TRAINED), "letters")}


def figures(runs: Runs) -> dict[str, float]:
    """Return the median over the seeds of each arm's last accuracies."""
    return {f"{arm}, {name}": median(runs.last(arm, name)) for arm in ARMS for name in ("digits", "letters")}


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""

    def share(arm: str) -> float:
        """Return the lower of the two accuracies, each as a share of its expert's."""
        return min(
            found[f"{arm}, {name}"] / max(found[f"{name} expert, {name}"], 1e-9) for name in ("digits", "letters")
        )

    return {
        "OPD: both tasks at least 0.97 of their experts": share("OPD") >= 0.97,
        "GRPO is lower": share("GRPO") < share("OPD"),
        "average of the weights is lower": share("average") < share("OPD"),
    }
