"""Top-k divergences have less variance than sampled tokens; without the tail they take probability from the top-k."""

import random
from collections.abc import Callable, Mapping
from statistics import median

import torch
from lab import Arm, Method, Step
from loop import Loop, policy_loss
from make_chains import Task, questions
from minimal_opd import Rollout
from results import Panel, Runs
from torch import Tensor

from roll_opd.objective.divergences import REVERSE_KL, topk_divergence

LENGTH, STEPS = 8, 300
BATCH = 4  # answers of a step, each to another question
TOP = 4  # tokens with the largest probabilities of the student
BATCHES = 50  # of the first student, for the variance

# (student log-probs f32 [B, A, V], teacher log-probs f32 [B, A, V], sampled tokens int64 [B, A]) -> loss f32 []
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def sampled(student_BAV: Tensor, teacher_BAV: Tensor, tokens_BA: Tensor) -> Tensor:
    """Return the policy loss with the advantage teacher minus student log-prob of the sampled token."""
    student_BA, teacher_BA = (side.gather(-1, tokens_BA[..., None])[..., 0] for side in (student_BAV, teacher_BAV))
    return policy_loss(student_BA, teacher_BA - student_BA.detach())


def with_tail(student_BAV: Tensor, teacher_BAV: Tensor, tokens_BA: Tensor) -> Tensor:
    """Return the reverse KL over the top-k and the bucket of all other tokens, the package's `topk`."""
    top_BAK = student_BAV.topk(TOP).indices
    sides = []
    for side_BAV in (student_BAV, teacher_BAV):
        rest_BA1 = side_BAV.scatter(-1, top_BAK, -torch.inf).logsumexp(-1, keepdim=True)
        sides.append(torch.cat([side_BAV.gather(-1, top_BAK), rest_BA1], dim=-1).flatten(0, 1))
    student_ML, teacher_ML = sides
    return topk_divergence(student_ML, teacher_ML, REVERSE_KL).mean()


def generalised(student_BAV: Tensor, teacher_BAV: Tensor, tokens_BA: Tensor) -> Tensor:
    """Return the generalised reverse KL over the top-k alone: the sum of s log(s/t) - s + t."""
    return REVERSE_KL(*_of_top(student_BAV, teacher_BAV)).mean()


def truncated(student_BAV: Tensor, teacher_BAV: Tensor, tokens_BA: Tensor) -> Tensor:
    """Return the sum of s log(s/t) over the top-k alone."""
    student_BAK, teacher_BAK = _of_top(student_BAV, teacher_BAV)
    return (student_BAK.exp() * (student_BAK - teacher_BAK)).sum(-1).mean()


def full(student_BAV: Tensor, teacher_BAV: Tensor, tokens_BA: Tensor) -> Tensor:
    """Return the reverse KL over the vocabulary."""
    return REVERSE_KL(student_BAV, teacher_BAV).mean()


def _of_top(student_BAV: Tensor, teacher_BAV: Tensor) -> tuple[Tensor, Tensor]:
    top_BAK = student_BAV.topk(TOP).indices
    return student_BAV.gather(-1, top_BAK), teacher_BAV.gather(-1, top_BAK)


def small_batches(loss: Loss) -> Method:
    """Return the method that trains on `BATCH` answers of the student; its first step measures the gradients."""

    def begin(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
        rates, first = arm.rates(), gradients(engine, task, arm.length, loss, drawn)

        def step() -> dict[str, float]:
            engine.sample(questions(task, BATCH, drawn.randrange(10**9)), arm.length, greedy=False)
            student_BAV = engine.distributions(engine.student)
            with torch.no_grad():
                teacher_BAV = engine.distributions(engine.teacher)
            engine.minimise(loss(student_BAV, teacher_BAV, engine.rollout.answers_BA), next(rates))
            mass = student_BAV.detach().topk(TOP).values.exp().sum(-1).mean()
            found = {"samples": BATCH, "tokens": BATCH * arm.length, "mass": float(mass), **first}
            first.clear()
            return found

        return step

    return begin


def gradients(engine: Loop, task: Task, length: int, loss: Loss, drawn: random.Random) -> dict[str, float]:
    """Return the variance of a loss's gradient over batches of the student, and the direction of its mean.

    The variance is summed over the parameters and divided by that of the full divergence. The direction is the cosine
    to the mean gradient of the full divergence.
    """
    engine.sample(questions(task, BATCH * BATCHES, drawn.randrange(10**9)), length, greedy=False)
    whole, variances, means = engine.rollout, [], []
    pairs = list(zip(whole.prompts_BP.split(BATCH), whole.answers_BA.split(BATCH), strict=True))
    for one in (loss, full):
        rows = []
        for prompts_BP, answers_BA in pairs:
            engine.rollout = Rollout(prompts_BP, answers_BA, torch.ones_like(answers_BA, dtype=torch.bool))
            with torch.no_grad():
                teacher_BAV = engine.distributions(engine.teacher)
            value = one(engine.distributions(engine.student), teacher_BAV, answers_BA)
            parts = torch.autograd.grad(value, list(engine.student.parameters()))
            rows.append(torch.cat([part.flatten() for part in parts]))
        rows_NP = torch.stack(rows)
        variances.append(rows_NP.var(0).sum())
        means.append(rows_NP.mean(0))
    direction = torch.cosine_similarity(means[0], means[1], dim=0)
    return {"variance": float(variances[0] / variances[1]), "direction": float(direction)}


LOSSES: dict[str, Loss] = {
    "sampled": sampled,
    "top-4, tail": with_tail,
    "top-4, generalised": generalised,
    "top-4, truncated": truncated,
}
ARMS = {name: Arm(small_batches(loss), STEPS, LENGTH, learning_rate=1e-3) for name, loss in LOSSES.items()}
PANELS = {
    "4 answers in a step": Panel(tuple(ARMS)),
    "probability of the student's top-4": Panel(tuple(ARMS), y="mass"),
}


def figures(runs: Runs) -> dict[str, float]:
    """Return medians over the seeds, and the number of seeds that reach the bar."""
    found: dict[str, float] = {}
    for arm in ARMS:
        found[f"{arm} seeds at the bar"] = sum(best >= ARMS[arm].bar for best in runs.best(arm))
        found[f"{arm} accuracy"] = median(runs.best(arm))
        found[f"{arm} least mass"] = median(min(values) for values in runs.series(arm, "mass"))
        found[f"{arm} variance"] = round(median(values[0] for values in runs.series(arm, "variance")), 2)
        found[f"{arm} direction"] = round(median(values[0] for values in runs.series(arm, "direction")), 2)
    found["variance ratio"] = round(found["sampled variance"] / found["top-4, tail variance"], 1)
    return found


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    return {
        "variance of sampled tokens more than 5 times that of the top-k": found["variance ratio"] > 5,
        "all seeds reach the bar with the top-k, not with sampled tokens": (
            found["top-4, tail seeds at the bar"] >= 3 > found["sampled seeds at the bar"]
        ),
        "without the tail the probability of the top-k falls below 0.5": found["top-4, truncated least mass"] < 0.5,
        "without the tail the accuracy stays below 0.1": found["top-4, truncated accuracy"] < 0.1,
        "with the tail or the generalised KL it stays above 0.5": (
            min(found[f"top-4, {name} least mass"] for name in ("tail", "generalised")) > 0.5
        ),
    }


def findings(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities that benchmarks/claims.md states."""
    tail, truncated = "top-4, tail", "top-4, truncated"
    return {
        "variance of sampled tokens more than 5 times that of the top-k": found["variance ratio"] > 5,
        "more seeds reach the bar with the top-k than with sampled tokens": (
            found[f"{tail} seeds at the bar"] > found["sampled seeds at the bar"]
        ),
        "without the tail the probability of the top-k falls below 0.5, with it it does not": (
            found[f"{truncated} least mass"] < 0.5 < found[f"{tail} least mass"]
        ),
        "the generalised KL keeps more of the probability than no tail": (
            found["top-4, generalised least mass"] > found[f"{truncated} least mass"]
        ),
    }
