"""Check a teacher by its log-probs on a few samples.

A wrong teacher raises no error: it returns plausible log-probs, and the student trains on them. The checks compare
several log-probs of the teacher with each other. They also compare the teacher's log-probs with the student's log-probs
of the same texts.

Legend: N scored tokens of all texts, K tokens of a top-k, S samples.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

Verdict = Literal["ok", "warning", "failed"]

WIDTH = 80  # columns of the table
MARGIN = 1.5  # nats per token by which a sound teacher may be below the student, at temperature 1 or above
SHARED_MASS = 0.5  # smallest probability that each model must give to the other's top-k
# nats by which two computations of a log-prob may differ on average: in f32, and in bf16 or fp16
EXACT, ROUNDED = 1e-3, 0.1
TEMPERATURE_ERROR = 0.02  # largest relative error of the measured temperature
FLAT = 0.01  # nats by which the log-prob of the most likely token must exceed -ln V
SURPRISED = 12.0  # as MARGIN, for the one token that ends an answer
FEW = 32  # minimum action tokens: means over fewer tokens are mostly noise
SIGNIFICANT = 3.0  # standard errors
FEWEST_GROUPS = 16  # minimum prompts: standard errors over fewer prompts are too small
PREFERENCE = "agrees with the reward"
# A teacher is the student itself if the mean difference in nats per token is below the first number, and the overlap of
# the top-k above the second. A student that a server computes in bf16 differs by less from the student in f32
ITSELF, ITSELF_OVERLAP = 0.02, 0.95
IN_COMMON = 0.2  # smallest shared probability; a sound teacher shares twice as much with a student of another task


@dataclass(frozen=True)
class Check:
    """A row of the table. `meaning` explains the value, or it names the fault and the remedy."""

    check: str
    value: str
    verdict: Verdict
    meaning: str


@dataclass(frozen=True)
class Readings:
    """Log-probs of student and teacher on the same N tokens, at the sampling temperature.

    The N tokens do not include observed tokens.
    """

    student_logprobs: np.ndarray  # f32 [N]
    student_ids: np.ndarray  # int32 [N, K], most likely first
    student_topk: np.ndarray  # f32 [N, K], log-probs of the top-k
    teacher_logprobs: np.ndarray
    teacher_ids: np.ndarray
    teacher_topk: np.ndarray
    teacher_plain: np.ndarray  # f32 [N, K], log-probs of `teacher_ids` at temperature 1
    again: np.ndarray  # f32 [at most N], log-probs of the teacher's second computation, for the first tokens
    in_run: np.ndarray  # f32 [N], the teacher's log-probs that the update reads; NaN at tokens that were not sampled
    sampled: np.ndarray  # bool [N], true if sampled by the student
    prompted: np.ndarray  # bool [N], true in a prompt, except at special tokens
    answered: np.ndarray  # bool [N], true in an answer from the row
    ended: np.ndarray  # bool [N], true at the token that ended a sample

    def without(self, observed: np.ndarray) -> "Readings":
        """Return the readings without observed tokens.

        Args:
            observed: bool [N], true at observed tokens.
        """
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return Readings(**{name: array[~observed[: len(array)]] for name, array in arrays.items()})


@dataclass(frozen=True)
class Settings:
    """Settings of the run that the verdicts depend on."""

    temperature: float
    exact: bool  # the teacher computes in f32
    vocab_size: int  # token ids that student and teacher both have
    # the teacher has another prompt than the student, so its log-probs of the samples may be low
    reads_more: bool = False
    may_be_student: bool = True  # whether the teacher may have the student's weights

    @property
    def tolerance(self) -> float:
        """Largest allowed mean difference between two computations of the log-probs, in nats."""
        return EXACT if self.exact else ROUNDED


def checks(readings: Readings, settings: Settings) -> list[Check]:
    """Return the checks of the log-probs. If the teacher returns a top-k, the checks of the top-k are included.

    If a log-prob is not a finite number, only the check that failed is returned.
    """
    finite = _finite(readings)
    if finite.verdict != "ok":
        return [finite]
    has_topk = readings.teacher_ids.shape[1] > 0
    rows = [finite, _twice(readings, settings)]
    if has_topk:
        rows += [_temperature(readings, settings), _reads_input(readings, settings)]
    if not (settings.may_be_student or settings.reads_more):
        rows += _itself(readings)
    rows += _enough(readings)
    texts = {"samples": readings.sampled, "answers": readings.answered, "prompts": readings.prompted}
    for name, chosen in texts.items():
        if chosen.any():
            rows.append(_likely(readings, settings, name, chosen))
    return [*rows, *([_overlap(readings)] if has_topk else []), *_ends(readings, settings)]


def standard_errors(gaps: np.ndarray, rewards: np.ndarray, groups: Sequence[str]) -> float:
    """Return the slope of `gaps` over `rewards`, in standard errors. The result is 0 if the slope is 0.

    The standard errors are robust to groups: samples of one group are dependent, so their residuals are summed first
    (Liang and Zeger 1986).

    Args:
        gaps: f64 [S], the values to explain.
        rewards: f64 [S], the reward of each sample.
        groups: the group of each sample.
    """
    numbers = np.unique(np.asarray(groups), return_inverse=True)[1]
    count = int(numbers.max()) + 1
    centred = rewards - rewards.mean()
    square = float(centred @ centred)
    if square == 0 or count < 2:
        return 0.0
    slope = float(centred @ gaps) / square
    residuals = gaps - gaps.mean() - slope * centred
    sums = np.bincount(numbers, weights=centred * residuals)
    error = np.sqrt(float(sums @ sums) * count / (count - 1)) / square
    return slope / error if error > 0 else 0.0


def preference_check(gaps: np.ndarray, rewards: np.ndarray, groups: Sequence[str]) -> Check:
    """Check whether the teacher prefers samples with a higher reward.

    The verdict is a warning if the teacher significantly prefers samples with a lower reward.

    Args:
        gaps: f64 [S], mean of teacher minus student log-prob per token, for each sample.
        rewards: f64 [S], the reward of each sample.
        groups: the group of each sample.
    """
    if np.ptp(rewards) == 0:
        return Check(PREFERENCE, f"all rewards are {rewards[0]:g}", "ok", "not judged: no sample has a higher reward")
    better = rewards > rewards.mean()
    errors = standard_errors(gaps, rewards, groups)
    value = f"{gaps[better].mean():+.2f} against {gaps[~better].mean():+.2f}, {errors:+.1f} std errors"
    if len(set(groups)) >= FEWEST_GROUPS and errors < -SIGNIFICANT:
        return Check(
            PREFERENCE,
            value,
            "warning",
            "relative to the student, the teacher prefers the samples with the lower reward: the teacher is no better"
            " than the student at this task, or its layers are missing, or it reads another text than the student;"
            " measure the teacher's accuracy (validation.evaluate_teacher)",
        )
    meaning = (
        "mean of teacher minus student log-prob per token, first over the samples with a reward above the mean reward,"
        " then over the other samples"
    )
    return Check(PREFERENCE, value, "ok", meaning)


def table(title: str, rows: Sequence[Check]) -> str:
    """Return the checks as a table that is `WIDTH` characters wide.

    The meanings of warnings and failures follow below the table.
    """
    lines = [title, "-" * WIDTH]
    for row in rows:
        value = textwrap.wrap(row.value, WIDTH - 36) or [""]
        lines += [f"{row.check:<27}{value[0]:<{WIDTH - 35}}{row.verdict:>8}", *(" " * 27 + rest for rest in value[1:])]
    for row in rows:
        if row.verdict != "ok":
            lines += ["", *textwrap.wrap(f"{row.verdict}: {row.check}: {row.meaning}", WIDTH)]
    return "\n".join([*lines, "-" * WIDTH])


def _finite(readings: Readings) -> Check:
    of_teacher = (readings.teacher_logprobs, readings.teacher_topk, readings.in_run[readings.sampled])
    wrong = sum(int((~np.isfinite(values) | (values > EXACT)).sum()) for values in of_teacher)
    return Check(
        "log-probs are numbers",
        f"{wrong} are not" if wrong else "all",
        "failed" if wrong else "ok",
        "a log-prob is NaN, infinite or above 0: weights with NaN, or too large for the teacher's dtype"
        if wrong
        else "finite and at most 0",
    )


def _twice(readings: Readings, settings: Settings) -> Check:
    once = readings.teacher_logprobs[: len(readings.again)]
    repeated = float(np.abs(once - readings.again).mean(dtype=np.float64))
    wrong = repeated > settings.tolerance
    return Check(
        "same sequence twice",
        f"differs by {repeated:.1e}",
        "failed" if wrong else "ok",
        "the teacher's log-probs of one sequence change from call to call: dropout is on, or the weights change"
        if wrong
        else "mean difference between two computations, in nats",
    )


def _temperature(readings: Readings, settings: Settings) -> Check:
    """Check that the update reads log-probs at the sampling temperature T.

    At temperature T, two log-probs differ by 1/T of their difference at temperature 1.
    """
    wanted = settings.temperature
    plain = (readings.teacher_plain[:, :1] - readings.teacher_plain[:, 1:]).astype(np.float64)
    scored = (readings.teacher_topk[:, :1] - readings.teacher_topk[:, 1:]).astype(np.float64)
    product = float((plain * scored).sum())
    measured = float(np.square(plain).sum()) / product if product > 0 else wanted  # all are equally likely
    chosen = readings.sampled
    apart = np.abs(readings.teacher_logprobs[chosen] - readings.in_run[chosen])
    in_step = float(apart.mean(dtype=np.float64)) if chosen.any() else 0.0
    wrong = abs(measured / wanted - 1) > TEMPERATURE_ERROR
    verdict: Verdict = "failed" if wrong or in_step > settings.tolerance else "ok"
    meaning = (
        "temperature measured by comparison with log-probs at temperature 1; then the mean difference, in nats, from"
        " the log-probs that the update reads"
    )
    if wrong:
        meaning = (
            "the temperature of the teacher's log-probs is not the student's sampling temperature, so the log-probs of"
            " teacher and student are not comparable"
        )
    elif verdict == "failed":
        meaning = "the log-probs that the update reads differ from the teacher's log-probs at the sampling temperature"
    return Check("sampling temperature", f"{measured:.3f}, wanted {wanted:g}; step {in_step:.1e}", verdict, meaning)


def _reads_input(readings: Readings, settings: Settings) -> Check:
    """Check that the teacher has its embedding, final norm and output head.

    If one of them is missing, the distribution is uniform, or it is the same after every token.
    """
    above = readings.teacher_topk[:, 0].mean(dtype=np.float64) + math.log(settings.vocab_size)
    flat = above < FLAT
    same = len(readings.teacher_ids) > 1 and bool(
        (readings.teacher_ids == readings.teacher_ids[0]).all() and np.ptp(readings.teacher_topk, axis=0).max() < FLAT
    )
    meaning = "mean probability of the most likely token"
    if flat:
        meaning = "the distribution is uniform (-ln V): the weights of embedding, final norm or output head are missing"
    elif same:
        meaning = "the distribution is the same after every token: the teacher does not read its input"
    likeliest = float(np.exp(readings.teacher_topk[:, 0], dtype=np.float64).mean())
    return Check(
        "sees its input",
        f"most likely token {likeliest:.3f}, 1 / V {1 / settings.vocab_size:.1e}",
        "failed" if flat or same else "ok",
        meaning,
    )


def _enough(readings: Readings) -> Iterator[Check]:
    """Yield a warning if the samples have too few action tokens for reliable means."""
    count = int(readings.sampled.sum())
    if count < FEW:
        yield Check(
            "action tokens",
            str(count),
            "warning",
            f"the student generated fewer than {FEW} tokens in the first samples, too few for reliable checks: watch"
            " opd/reverse_kl/mean in the first steps, or raise rollout_batch_size",
        )


def _likely(readings: Readings, settings: Settings, name: str, chosen: np.ndarray) -> Check:
    """Compare the teacher's mean log-prob of some tokens with the student's mean and with a uniform distribution.

    Args:
        name: kind of the tokens: samples, answers or prompts.
        chosen: bool [N], true for tokens of this kind.
    """
    teacher = float(readings.teacher_logprobs[chosen].mean(dtype=np.float64))
    student = float(readings.student_logprobs[chosen].mean(dtype=np.float64))
    gaps = (readings.teacher_logprobs - readings.student_logprobs)[chosen].astype(np.float64)
    common = float(np.exp(np.minimum(gaps, 0)).mean())  # estimates 1 - total variation distance
    guess, margin = -math.log(settings.vocab_size), MARGIN / min(1.0, settings.temperature)
    verdict: Verdict = "ok"
    meaning = f"mean log-probs in nats; a sound teacher is at most {margin:.2g} nats below the student"
    # no verdict on text that the student cannot predict either, such as prompts for a model trained on answers
    if teacher < student - margin and student > guess + margin:
        verdict, rest = "warning", ""
        if teacher < guess:
            fails = name == "samples" and not settings.reads_more and common < IN_COMMON
            verdict = "failed" if fails else "warning"
            rest = f" and below a uniform distribution (-ln V), and the models share {common:.0%} of their probability"
        meaning = (
            f"the teacher's mean log-prob of the {name} is more than {margin:.2g} nats below the student's"
            f" mean log-prob{rest}:"
            + (" the teacher's prompt leads to different answers, or the cause is" if settings.reads_more else "")
            + " the weights of another model, missing layers, coarse quantisation, or token ids or a template"
            " with which the teacher was not trained"
        )
    elif name == "samples" and teacher < min(guess, student - margin):
        verdict = "warning"
        meaning = (
            "the student's log-probs of its samples are hardly above a uniform distribution (-ln V), so a sound"
            " teacher and a wrong one look alike: start with a trained student, or measure the teacher"
            " (validation.evaluate_teacher)"
        )
    elif name != "samples" and student <= guess + margin:
        meaning = "not judged: the student is no better than a uniform distribution (-ln V)"
    return Check(f"mean log-prob, {name}", f"{teacher:.2f}, student {student:.2f}, -ln V {guess:.2f}", verdict, meaning)


def _itself(readings: Readings) -> Iterator[Check]:
    """Yield a failure if the teacher has the student's weights. Prompts count too, which no training makes equal."""
    gap = float(np.abs(readings.teacher_logprobs - readings.student_logprobs).mean(dtype=np.float64))
    overlap = _shared_tokens(readings.student_ids, readings.teacher_ids) if readings.teacher_ids.shape[1] else 1.0
    if gap < ITSELF and overlap > ITSELF_OVERLAP:
        yield Check(
            "is not the student",
            f"log-probs differ by {gap:.1e} nats per token, top-k overlap {overlap:.0%}",
            "failed",
            "the teacher has the student's weights, so it teaches nothing: start the server with the teacher's model,"
            " or set allow_self_teacher: true",
        )


def _shared_tokens(student_ids: np.ndarray, teacher_ids: np.ndarray) -> float:
    """Return the fraction of the student's top-k [N, K] that is also in the teacher's top-k; 1 without tokens."""
    return float((student_ids[:, :, None] == teacher_ids[:, None, :]).any(2).mean()) if len(student_ids) else 1.0


def _overlap(readings: Readings) -> Check:
    """Check how much probability each model gives to the tokens that both top-k have in common.

    Only tokens that the student sampled are considered.
    """
    chosen = readings.sampled
    student_ids, teacher_ids = readings.student_ids[chosen], readings.teacher_ids[chosen]
    shared_NKK = student_ids[:, :, None] == teacher_ids[:, None, :]
    overlap = _shared_tokens(student_ids, teacher_ids)
    masses = (
        (np.exp(readings.student_topk[chosen], dtype=np.float64) * shared_NKK.any(2)).sum(1),
        (np.exp(readings.teacher_topk[chosen], dtype=np.float64) * shared_NKK.any(1)).sum(1),
    )
    of_student, of_teacher = (float(mass.mean()) if len(mass) else 1.0 for mass in masses)
    whole = [
        np.exp(topk[chosen], dtype=np.float64).sum(1).mean() for topk in (readings.student_topk, readings.teacher_topk)
    ]
    few = min(of_student / whole[0], of_teacher / whole[1]) < SHARED_MASS
    return Check(
        f"top-{student_ids.shape[1]} overlap",
        f"{overlap:.0%} of tokens, {of_student:.0%} and {of_teacher:.0%} of mass",
        "warning" if few else "ok",
        "student and teacher predict different tokens: token ids of another family, weights of several models, or"
        " text outside the teacher's training data"
        if few
        else "fraction of the student's top-k that is also in the teacher's top-k, and the probability of these tokens"
        " under the student and under the teacher",
    )


def _ends(readings: Readings, settings: Settings) -> Iterator[Check]:
    if not readings.ended.any():
        return
    teacher = float(readings.teacher_logprobs[readings.ended].mean(dtype=np.float64))
    student = float(readings.student_logprobs[readings.ended].mean(dtype=np.float64))
    wrong = teacher < student - SURPRISED / min(1.0, settings.temperature)
    yield Check(
        "end of answers",
        f"{teacher:.2f}, student {student:.2f}",
        "warning" if wrong else "ok",
        "the teacher gives the token that ends the student's answers almost no probability, so the student learns not"
        " to stop: the end-of-sequence tokens or the templates of the two models differ"
        if wrong
        else "mean log-prob of the token that ended a sample",
    )
