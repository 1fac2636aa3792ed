"""Make samples from teacher files: given answers with the teacher's log-probs, and its top-k as targets of the loss.

A file has scores only for its own answers, so it cannot be a `TeacherScorer`. Instead, the pipeline `offline_distill`
draws the rows of the file.

`data.teacher_scores` checks each row when the files are opened. The checks here find faults that a single row does not
show. For example, the answers may be from another model, the log-probs may be shifted by one token, or the student may
have been fine-tuned on answers of another teacher.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from roll_opd.config.plan import FilePlan, ObjectivePlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.teacher_scores import TeacherScores, narrowed
from roll_opd.samples.sample import Sample, changed, logprobs_column
from roll_opd.teachers.logprob_checks import Check, Verdict
from roll_opd.teachers.teacher_registry import TeacherStart, register_teacher
from roll_opd.workers.target_refs import hold


@register_teacher("files")
def no_scorer(_: TeacherStart) -> None:
    """Return None: the scores are in the rows."""


def scored_samples(rows: Sequence[Prompt], teacher: str) -> list[Sample]:
    """Return a sample for each row, with the log-probs of `teacher` if the file has them."""
    return [_sample(row, _scores(row), teacher) for row in rows]


def with_topk(
    samples: Sequence[Sample], rows: Sequence[Prompt], teacher: str, objective: ObjectivePlan
) -> list[Sample]:
    """Return the samples with references to the teacher's top-k.

    With `opd_objective: sampled`, the samples are returned unchanged.
    """
    if objective.opd_objective == "sampled":
        return list(samples)
    held = hold({number: narrowed(_scores(row), objective.opd_topk) for number, row in enumerate(rows)})
    return [changed(sample, teacher_targets={teacher: held[number]}) for number, sample in enumerate(samples)]


def _sample(row: Prompt, scores: TeacherScores, teacher: str) -> Sample:
    mask = np.ones(len(scores.response_ids), bool) if scores.mask is None else scores.mask
    columns = {"action_mask": mask}
    if scores.logprobs is not None:
        columns[logprobs_column(teacher)] = scores.logprobs
    tokens = np.concatenate([scores.prompt_ids, scores.response_ids])
    return Sample(tokens, len(scores.prompt_ids), columns, id=row.id, group_id=row.id)


def _scores(row: Prompt) -> TeacherScores:
    assert row.scores is not None
    return row.scores


SHIFTS = (-1, 0, 1)  # shifts, in tokens, that are tried for the file's log-probs
FEW_TOKENS = 64  # a correlation over fewer tokens is mostly noise
CLEAR = 0.2  # a shift is reported if its correlation is higher by this
# largest mean difference (nats per token) of student and teacher on answers that the student should have sampled
FAR = 3.0
COVERED = 0.5  # smallest mean probability of a top-k


def file_checks(
    rows: Sequence[Prompt], student_logprobs: Sequence[np.ndarray], source: FilePlan, objective: ObjectivePlan
) -> list[Check]:
    """Return the rows of the preflight's table for a teacher file.

    Args:
        rows: the first rows of the file.
        student_logprobs: f32 [T-P] for the answer of each row.
    """
    found = [_origin(rows), _consistency(rows, source, objective)]
    scored = [(row.scores.logprobs, own) for row, own in zip(rows, student_logprobs, strict=True) if row.scores]
    pairs = [(teacher, own) for teacher, own in scored if teacher is not None]
    if pairs:
        found += [_alignment(pairs), _distance(pairs, objective)]
    topk = [row.scores.topk_logprobs for row in rows if row.scores and row.scores.topk_logprobs is not None]
    if topk and objective.opd_objective == "topk":
        found.append(_coverage(topk, objective.opd_topk))
    return found


def _origin(rows: Sequence[Prompt]) -> Check:
    names = Counter(row.scores.teacher or "not recorded" for row in rows if row.scores)
    known = all(row.scores and row.scores.tokenizer for row in rows)
    value = ", ".join(f"{name} ({count} rows)" for name, count in names.items())
    if len(names) > 1:
        return Check(
            "teacher",
            value,
            "warning",
            "the first rows are from several teachers, so the student learns a mixture of these teachers",
        )
    if not known:
        meaning = (
            "the file does not state tokenizer and temperature: only token ids, texts and sums of probabilities"
            " were compared"
        )
        return Check("teacher", value, "warning", meaning)
    return Check(
        "teacher",
        value,
        "ok",
        "the first rows are from one teacher, with the student's tokenizer and at the run's temperature",
    )


def _consistency(rows: Sequence[Prompt], source: FilePlan, objective: ObjectivePlan) -> Check:
    """Check that the student was fine-tuned on answers of the file's teacher (arXiv 2604.13010)."""
    name = "teacher consistency"
    if objective.opd_objective == "topk":
        return Check(
            name,
            "not needed",
            "ok",
            "opd_objective topk does not require that the student was fine-tuned on answers of this teacher",
        )
    teachers = sorted({row.scores.teacher for row in rows if row.scores} - {""})
    if source.sft_teacher is None:
        meaning = (
            "sampled distillation from a file is sound only if the student was fine-tuned on this teacher's answers;"
            " set teacher.sft_teacher to the teacher of the fine-tuning"
        )
        return Check(name, "the teacher of the fine-tuning is unknown", "warning", meaning)
    value = f"{', '.join(teachers) or 'not recorded'}; fine-tuned on {source.sft_teacher}"
    if not teachers:
        return Check(name, value, "warning", "the file does not name its teacher, so the teachers were not compared")
    if teachers != [source.sft_teacher]:
        meaning = (
            "the student was fine-tuned on the answers of another teacher: score the student's answers with the"
            " teacher of the fine-tuning"
        )
        return Check(name, value, "failed", meaning)
    return Check(name, value, "ok", "the teacher of the fine-tuning is the teacher of the file")


def _alignment(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Check:
    """Check that the file's log-probs are not shifted by a token.

    The teacher's log-probs are correlated with the student's, without a shift and with a shift by one token in each
    direction.
    """
    by_shift = {shift: _correlation(pairs, shift) for shift in SHIFTS}
    value = ", ".join(f"{shift:+d}: {found:.2f}" for shift, found in by_shift.items())
    best = max(by_shift, key=lambda shift: by_shift[shift])
    tokens = sum(len(own) for _, own in pairs)
    if best and tokens >= FEW_TOKENS and by_shift[best] > by_shift[0] + CLEAR:
        meaning = (
            f"each log-prob of the file matches the token {best:+d} places away; shift the log-probs in the file so"
            " that each log-prob is at its own token"
        )
        return Check("alignment", value, "failed", meaning)
    return Check(
        "alignment", value, "ok", "correlation of the teacher's with the student's log-probs, for each shift in tokens"
    )


def _correlation(pairs: Sequence[tuple[np.ndarray, np.ndarray]], shift: int) -> float:
    """Return the correlation of the teacher's log-prob of token t with the student's log-prob of token t + shift.

    All shifts use the same tokens t, so the first and the last token of an answer are left out.
    """
    cut = [(teacher[1:-1], own[1 + shift : len(own) - 1 + shift]) for teacher, own in pairs if len(own) > 2]
    if not cut:
        return 0.0
    teacher, own = (np.concatenate(side).astype(np.float64) for side in zip(*cut, strict=True))
    if len(own) < 2 or not (teacher.std() and own.std()):
        return 0.0
    return float(np.corrcoef(teacher, own)[0, 1])


def _distance(pairs: Sequence[tuple[np.ndarray, np.ndarray]], objective: ObjectivePlan) -> Check:
    gap = float(np.concatenate([own - teacher for teacher, own in pairs]).mean(dtype=np.float64))
    value = f"{gap:+.3f} nats per token"
    if objective.opd_objective == "sampled" and abs(gap) > FAR:
        meaning = (
            "mean of student minus teacher log-prob on the answers; a difference this large means that another student"
            " sampled the answers"
        )
        return Check("student - teacher", value, "warning", meaning)
    return Check("student - teacher", value, "ok", "mean difference of student and teacher log-probs on the answers")


def _coverage(topk: Sequence[np.ndarray], k: int) -> Check:
    largest = (-np.sort(-values, axis=1)[:, :k].astype(np.float64) for values in topk)
    mass = float(np.concatenate([np.exp(values).sum(1) for values in largest]).mean())
    verdict: Verdict = "warning" if mass < COVERED else "ok"
    return Check("mass of the top-k", f"{mass:.3f}", verdict, "mean total probability of the teacher's top-k")
