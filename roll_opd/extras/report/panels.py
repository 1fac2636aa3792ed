"""Panels of the report for each mode of a run.

The panels are charts of the main metrics. A table has their values before and after training.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll_opd.extras.report.curves import downsample, ends, points, trend
from roll_opd.extras.report.text import limited, rounded
from roll_opd.tracking.reward_metrics import GRADED
from roll_opd.tracking.summary import (
    ACCURACY,
    DRAFT_ACCEPTANCE,
    FAILED_RATE,
    LOSS,
    OF_TEACHER,
    REVERSE_KL,
    STDERRS,
    VAL_REWARD,
    with_rewards,
    within_noise,
)

DIGITS = 6
STUDENT_LOGPROB = "opd/student_logprob"
SURPRISE = "surprise"  # computed here: the mean of -log p over sampled tokens, which estimates the entropy
MAX_METRICS, METRIC_POINTS = 200, 300  # maximum metrics outside the panels, and maximum points per metric


@dataclass(frozen=True)
class Panel:
    """A chart of one or more metrics.

    Lines without values are left out.
    """

    title: str
    what: str
    lines: tuple[tuple[str, str], ...]
    better: str = ""  # direction of improvement, up or down; "": none
    unless_zero: bool = False  # hidden if all values are 0, as the quantity is then unused
    modes: tuple[str, ...] = ()  # modes with this panel; empty: all


MIN_STEPS = 5  # number of steps needed to estimate the noise between steps
PANELS = (
    Panel(
        "Reverse KL to the teacher",
        "log p(student) − log p(teacher) of the student's sampled tokens, mean in nats. 0 is agreement.",
        ((REVERSE_KL, "student"),),
        "down",
    ),
    Panel(
        "Log-ratio to the teacher",
        "log p(student) − log p(teacher) of given answers, mean in nats. It may have either sign; 0 is agreement.",
        (("opd/log_ratio/mean", "training"), ("val/opd/log_ratio", "validation")),
    ),
    Panel(
        "Student and teacher",
        "On the same tokens: perplexities, exp(−mean log p); the teacher's mean log p and the reverse KL, in nats.",
        (
            ("opd/student_perplexity", "student perplexity"),
            ("opd/teacher_perplexity", "teacher perplexity"),
            ("opd/teacher_logprob", "teacher log-prob"),
            (REVERSE_KL, "reverse KL"),
        ),
    ),
    Panel("Validation accuracy", "Fraction of correct answers to held-out prompts.", ((ACCURACY, "student"),), "up"),
    Panel("Reward", "Mean external reward of the step's samples.", (("critic/score/mean", "samples"),), "up"),
    Panel(
        "Loss",
        "Training and validation loss on rows with answers.",
        (("sft/loss", "training"), ("dpo/loss", "training"), (LOSS, "validation")),
        "down",
    ),
    Panel(
        "Pairs in the right order",
        "Fraction of pairs in which the chosen answer has the larger implicit reward.",
        (("dpo/accuracy", "training"), ("val/dpo/accuracy", "validation")),
        "up",
    ),
    Panel(
        "Margin",
        "Implicit reward of the chosen answer minus implicit reward of the rejected answer.",
        (("dpo/margin", "training"), ("val/dpo/margin", "validation")),
        "up",
    ),
    Panel(
        "Implicit rewards",
        "β · (log p(student) − log p(reference)) of complete answers.",
        (("dpo/chosen_reward", "chosen"), ("dpo/rejected_reward", "rejected")),
    ),
    Panel(
        "Failed runs",
        "Fraction of a step's runs that failed, at the steps with failures.",
        ((FAILED_RATE, "runs"),),
        "down",
    ),
    Panel("Divergence", "Distillation loss between distributions, in nats.", (("actor/opd_loss", "loss"),), "down"),
    Panel(
        "KL to the reference policy",
        "Divergence of the student from its reference policy.",
        (("actor/kl_loss", "in the loss"), ("critic/reference_kl", "in the reward")),
        unless_zero=True,
    ),
    Panel(
        "Clipped tokens",
        "Fraction of tokens with a clipped ratio.",
        (("actor/clipfrac", "tokens"),),
        modes=("rl", "mixed"),
    ),
    Panel("Entropy", "Entropy of the student's next token, in nats.", (("actor/entropy", "student"),)),
    Panel(
        "Entropy, estimated",
        "Mean of −log p over the student's sampled tokens, in nats.",
        ((SURPRISE, "student"),),
    ),
    Panel(
        "Response length",
        "Mean number of tokens in the student's responses.",
        (("tokens/response_length/mean", "training"), ("val/response_length/mean", "validation")),
    ),
    Panel(
        "Accepted drafts",
        "Fraction of the tokens proposed by speculation that are part of responses.",
        ((DRAFT_ACCEPTANCE, "drafts"),),
        "up",
    ),
    Panel("Value loss", "Loss of the critic.", (("critic/loss", "critic"),), "down"),
    Panel(
        "Explained variance",
        "Fraction of the returns' variance that the critic predicts.",
        (("critic/explained_variance", "critic"),),
    ),
    Panel("Gradient norm", "Norm before clipping.", (("actor/grad_norm", "student"),)),
)


def with_surprise(rows: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return copies of the rows.

    If no row has a measured entropy, the metric `SURPRISE` is added: the negative mean log-prob of the student.
    """
    if any("actor/entropy" in row for row in rows):
        return [dict(row) for row in rows]
    return [{**row, **({SURPRISE: -row[STUDENT_LOGPROB]} if STUDENT_LOGPROB in row else {})} for row in rows]


def charts(rows: Sequence[Mapping[str, float]], mode: str, *, of_games: bool = False) -> list[dict[str, Any]]:
    """Return the panels that have values, as data for the page.

    Args:
        of_games: whether the validation panel is about games instead of prompts.
    """
    rows = _graded(rows)
    panels = [_as_games(panel) if of_games else panel for panel in _panels(rows, mode)]
    drawn = [_chart(panel, rows) for panel in panels]
    return [chart for chart in drawn if chart["lines"]]


def all_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, list[list[float]]]:
    """Return the downsampled curve of every metric, by metric name."""
    names = sorted({name for row in rows for name in row} - {"step", SURPRISE})[:MAX_METRICS]
    return {limited(name): _short(downsample(points(rows, name), METRIC_POINTS)) for name in names}


def before_after(rows: Sequence[Mapping[str, float]], mode: str, *, comparable: bool = True) -> list[dict[str, Any]]:
    """Return the table of values before and after training, with one row for each metric of the panels.

    For a validation metric, the values are the first and the last one. For other metrics, they are the means over the
    first and the last tenth of the steps. The validation accuracy also has the teacher's value.

    Args:
        comparable: False if the settings changed during the run. Rows of metrics other than validation metrics then do
            not state whether the difference is noise.
    """
    rows = _graded(rows)
    table = []
    seen: set[str] = set()
    for panel in _panels(rows, mode):
        for metric, name in panel.lines:
            values = [value for _, value in points(rows, metric)]
            if len(values) < 2 or metric in seen:
                continue
            seen.add(metric)
            held_out = metric.startswith("val")
            before, after = (values[0], values[-1]) if held_out else ends(values)
            label = panel.title if len(panel.lines) == 1 else f"{panel.title}, {name}"
            row = {
                "name": label,
                "before": before,
                "after": after,
                "better": panel.better,
                "held_out": held_out,
                "noise": _is_noise(rows, metric, values, after - before) if held_out or comparable else None,
            }
            if metric in STDERRS and (teacher := _teacher(rows, metric)) is not None:
                row["teacher"] = teacher
            table.append(row)
    return table


def _graded(rows: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """Return the rows, with mean validation rewards if some rewards of the run are neither 0 nor 1."""
    return [with_rewards(row) for row in rows] if any(GRADED in row for row in rows) else rows


def _as_reward(panel: Panel) -> Panel:
    """Return the validation panel with the title and the text for a mean reward.

    It is used if rewards have values other than 0 and 1.
    """
    line = ((VAL_REWARD, "student"),)
    return replace(panel, title="Validation reward", what="Mean reward of held-out prompts.", lines=line)


def _as_games(panel: Panel) -> Panel:
    """Return the panel. If it is a validation panel, its text is about games."""
    if panel.lines[0][0] not in STDERRS:
        return panel
    if panel.title == "Validation reward":
        return replace(panel, what="Mean reward of held-out games.")
    return replace(panel, what="Fraction of held-out games that were won.")


def _is_noise(
    rows: Sequence[Mapping[str, float]], metric: str, values: Sequence[float], difference: float
) -> bool | None:
    """Return whether the difference between before and after is within noise; None if unknown.

    For the accuracy or mean reward of validations, the noise is the recorded standard error over prompts. It is unknown
    for other validation metrics. For metrics of every step, it is estimated from the differences between neighbouring
    steps.
    """
    if metric in STDERRS:
        stderrs = [value for _, value in points(rows, STDERRS[metric])]
        return within_noise(difference, stderrs[0], stderrs[-1]) if len(stderrs) > 1 else None
    if metric.startswith("val") or len(values) < MIN_STEPS:
        return None
    tenth = math.ceil(len(values) / 10)
    stderr = math.sqrt(sum((b - a) ** 2 for a, b in itertools.pairwise(values)) / 2 / (len(values) - 1) / tenth)
    return within_noise(difference, stderr, stderr)


def _panels(rows: Sequence[Mapping[str, float]], mode: str) -> list[Panel]:
    """Return the panels of the mode that have values and are not part of an earlier panel."""
    graded = any(GRADED in row for row in rows)
    nonzero = {name for row in rows for name, value in row.items() if value}
    measured = {name for row in rows for name in row}
    found: list[Panel] = []
    seen: set[str] = set()
    for panel in PANELS:
        new = {metric for metric, _ in panel.lines} & (nonzero if panel.unless_zero else measured) - seen
        if new and (not panel.modes or mode in panel.modes):
            seen |= new
            found.append(_as_reward(panel) if graded and panel.lines[0][0] == ACCURACY else panel)
    return found


def _chart(panel: Panel, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    curves = [(name, metric, points(rows, metric)) for metric, name in panel.lines]
    references = []
    if (measure := panel.lines[0][0]) in STDERRS:
        accuracies, teacher = points(rows, measure), _teacher(rows, measure)
        references += [{"name": "teacher", "value": teacher}] if teacher is not None else []
        references += [{"name": "start", "value": accuracies[0][1]}] if accuracies and accuracies[0][0] == 0 else []
    return {
        "title": panel.title,
        "what": panel.what,
        "lines": [
            {"name": name, "metric": metric, "points": _short(downsample(curve)), "trend": _short(trend(curve))}
            for name, metric, curve in curves
            if curve and not (panel.unless_zero and not any(value for _, value in curve))
        ],
        "references": references,
    }


def _teacher(rows: Sequence[Mapping[str, float]], metric: str) -> float | None:
    """Return the best teacher's value of a validation metric."""
    measured = points(rows, OF_TEACHER[metric])
    return measured[-1][1] if measured else None


def _short(curve: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[rounded(step, DIGITS + 3), rounded(value, DIGITS)] for step, value in curve]
