"""The scoring stage of a step.

Each teacher scores the samples with its tags. The reference policy scores all samples.

The stage counts the tokens that each teacher scores, and checks that a teacher with another tokenizer scores enough of
the text.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roll_opd.base.failures import RunError
from roll_opd.config.plan import ObjectivePlan, TeacherPlan
from roll_opd.samples.sample import Sample, TargetRef, changed, chunks_column, logprobs_column, with_columns
from roll_opd.teachers.logprob_checks import Check
from roll_opd.teachers.teacher_interface import LOGPROBS, Target, TeacherAnswer, TeacherScorer, Wanted
from roll_opd.teachers.views import TeacherView
from roll_opd.tracking.sample_metrics import Cut, cut_of

MAX_UNCOVERED = 0.05  # largest allowed fraction of action tokens without a teacher log-prob
ENOUGH = 1000  # the fraction is checked from this number of action tokens on


class Coverage:
    """Counts the action tokens with and without a log-prob, for each teacher with another tokenizer.

    The counts are over the whole run.
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._uncovered: Counter[str] = Counter()

    def add(self, samples: Sequence[Sample]) -> None:
        """Add samples to the counts.

        Raises RunError if too many action tokens have no log-prob of a teacher: more than the fraction `MAX_UNCOVERED`,
        out of at least `ENOUGH` action tokens.
        """
        for sample in samples:
            for name, alignment in sample.alignments.items():
                self._tokens[name] += sample.action_tokens
                self._uncovered[name] += alignment.uncovered
        for name, tokens in self._tokens.items():
            share = self._uncovered[name] / max(tokens, 1)
            if tokens >= ENOUGH and share > MAX_UNCOVERED:
                raise RunError(f"teacher {name} scores too little of the answers: {_uncovered(share)}")


def coverage_checks(samples: Sequence[Sample], teacher: str) -> list[Check]:
    """Return the rows of the preflight's table for a teacher with another tokenizer."""
    cut = cut_of(samples, teacher)
    return [
        Check(
            "aligned 1:1",
            f"{1 - cut.chunked_bytes:.0%} of bytes, {cut.chunks} chunks",
            "ok",
            "fraction of bytes in tokens that are the same in both tokenizers, and number of chunks; a chunk ends at a"
            " byte at which both a student token and a teacher token end",
        ),
        Check(
            "longest chunk",
            f"{cut.longest_chunk} student tokens",
            "ok",
            "number of student tokens in the longest chunk",
        ),
        _covered(cut),
    ]


def _covered(cut: Cut) -> Check:
    value = f"{cut.uncovered:.2%} of action tokens"
    if cut.uncovered > MAX_UNCOVERED:
        return Check("uncovered tokens", value, "failed", _uncovered(cut.uncovered))
    meaning = (
        "tokens without a teacher log-prob, which get no credit: special tokens and bytes that the teacher's"
        " tokenizer lacks"
    )
    return Check("uncovered tokens", value, "ok", meaning)


def _uncovered(share: float) -> str:
    return (
        f"{share:.1%} of the action tokens have no log-prob from the teacher (at most {MAX_UNCOVERED:.0%} may lack"
        " one): the teacher's tokenizer has no token for their bytes or for a special token; use a teacher whose"
        " tokenizer covers all bytes, or a template whose special tokens exist in both tokenizers"
    )


STARVED = 10  # number of steps without a token after which a warning is logged

_log = logging.getLogger(__name__)


class TokenShares:
    """Computes the fraction of each step's tokens that a teacher scored.

    A warning is logged if a teacher scored no tokens in the last `STARVED` steps.
    """

    def __init__(self) -> None:
        self._without: Counter[str] = Counter()  # teacher -> number of consecutive steps without a token

    def metrics(self, samples: Sequence[Sample], teachers: Sequence[str]) -> dict[str, float]:
        """Return the metrics `opd/teacher/NAME/token_share`.

        Each of them is the fraction of the step's action tokens that are in samples scored by the teacher.
        """
        total = sum(sample.action_tokens for sample in samples)
        found = {}
        for name in teachers:
            scored = sum(sample.action_tokens for sample in samples if name in sample.teacher_logprobs)
            found[f"opd/teacher/{name}/token_share"] = scored / total if total else 0.0
            self._without[name] = 0 if scored or not total else self._without[name] + 1
            if self._without[name] == STARVED:
                _log.warning(
                    "teacher %s has scored no token in the last %d steps: no sample had a tag of this teacher; check"
                    " tag_included and domain_interleave_probs",
                    name,
                    STARVED,
                )
        return found


@dataclass(frozen=True)
class Teacher:
    """A teacher: its plan, its scorer, and its view of the samples."""

    plan: TeacherPlan
    scorer: TeacherScorer
    view: TeacherView

    def scores(self, sample: Sample) -> bool:
        """Whether the teacher scores a sample.

        A teacher scores samples with its tags, unless a workflow has already set the teacher's log-probs.
        """
        return self.plan.accepts(sample.tag) and self.plan.name not in sample.teacher_logprobs

    async def score(
        self, samples: Sequence[Sample], temperature: float, wanted: Wanted = LOGPROBS
    ) -> list[TeacherAnswer]:
        """Return an answer for each sample, mapped to the student's response tokens.

        Raises the errors of `TeacherScorer.score`.
        """
        sequences = [self.view.reads(sample) for sample in samples]
        answers = await self.scorer.score(sequences, temperature, self.view.wants(wanted))
        return [self.view.back(sample, answer) for sample, answer in zip(samples, answers, strict=True)]


class TopkSource(Protocol):
    """A model that chooses the tokens which the teachers score. The student implements this protocol."""

    async def topk_ids(
        self, samples: Sequence[Sample], temperature: float, objective: ObjectivePlan, /
    ) -> list[TargetRef]:
        """Return references to the model's most likely tokens at each response token."""


@dataclass(frozen=True)
class Scorers:
    """The teachers of a run and its reference policy. `pipelines.distill` adds the student's own old log-probs.

    If `targets_for` is set, the teachers also compute the targets of this objective. If `student` is set too, the
    targets are the teachers' log-probs of the student's most likely tokens.
    """

    teachers: Sequence[Teacher] = ()
    reference: TeacherScorer | None = None
    targets_for: ObjectivePlan | None = None
    student: TopkSource | None = None
    shares: TokenShares = field(default_factory=TokenShares)
    coverage: Coverage = field(default_factory=Coverage, compare=False)

    def step_metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the metrics of a step's scoring.

        The metrics are the requests and tokens sent to servers, and the fraction of tokens that each teacher scored.
        The fraction is left out for a Megatron teacher without tags, because such a teacher scores all tokens.
        """
        partial = [one.plan.name for one in self.teachers if one.plan.tags is not None or one.plan.role is None]
        metrics = self.shares.metrics(samples, partial) if partial else {}
        for teacher in self.teachers:
            metrics |= teacher.scorer.drain_metrics()
        return metrics

    def lacks(self, sample: Sample) -> bool:
        """Whether a sample still needs log-probs of the reference policy or of a teacher."""
        reads = self.reference is not None and sample.ref_logprobs is None
        return reads or any(teacher.scores(sample) for teacher in self.teachers)

    async def compute_logprobs(self, samples: Sequence[Sample], temperature: float) -> list[Sample]:
        """Return the samples with the log-probs and targets of all models. The models compute them concurrently.

        Raises RunError if the run has teachers but none of them accepts the tag of a sample. Also raises RunError if a
        teacher with another tokenizer can score too few tokens of the run.
        """
        ids = None
        if self.student and self.targets_for:
            ids = await self.student.topk_ids(samples, temperature, self.targets_for)
        by_teacher, of_reference = await asyncio.gather(
            asyncio.gather(*[self._answers(teacher, samples, temperature, ids) for teacher in self.teachers]),
            self._reference_logprobs(samples, temperature),
        )
        names = [teacher.plan.name for teacher in self.teachers]
        result = []
        for number, sample in enumerate(samples):
            answers = {name: found[number] for name, found in zip(names, by_teacher, strict=True) if number in found}
            result.append(_with_answers(sample, answers, names) if answers else sample)
        unscored = sorted({sample.tag for sample in result if not sample.teacher_logprobs}) if self.teachers else []
        if unscored:
            raise RunError(
                f"no teacher scores samples with tag {', '.join(unscored)}: add the tag to the tag_included of a"
                " teacher"
            )
        if any(sample.alignments for sample in result):
            self.coverage.add(result)
        if self.reference:
            return with_columns(result, ref_logprobs=[answer.logprobs for answer in of_reference])
        return result

    async def _answers(
        self, teacher: Teacher, samples: Sequence[Sample], temperature: float, ids: Sequence[TargetRef] | None
    ) -> dict[int, TeacherAnswer]:
        """Return a map from the index of a sample to the teacher's answer."""
        numbers = [number for number, sample in enumerate(samples) if teacher.scores(sample)]
        if not numbers:
            return {}
        wanted = wanted_for(self.targets_for, [ids[n] for n in numbers] if ids else ())
        answers = await teacher.score([samples[n] for n in numbers], temperature, wanted)
        return dict(zip(numbers, answers, strict=True))

    async def _reference_logprobs(self, samples: Sequence[Sample], temperature: float) -> list[TeacherAnswer]:
        if self.reference is None:
            return []
        return await self.reference.score([(s.tokens, s.prompt_length) for s in samples], temperature)


def wanted_for(objective: ObjectivePlan | None, ids: Sequence[TargetRef]) -> Wanted:
    """Return the targets that an objective needs.

    Args:
        objective: the objective. If None, only log-probs are needed.
        ids: references to the student's most likely tokens. It is empty if the objective does not use these tokens.
    """
    if objective is None:
        return LOGPROBS
    if objective.opd_objective == "full":
        return Wanted(hidden=True)
    return Wanted(topk=None if ids else objective.opd_topk, ids=ids, vocab_size=objective.opd_vocab_size)


def check_targets(teachers: Sequence[Teacher], objective: ObjectivePlan) -> None:
    """Check that all teachers can compute the targets of an objective.

    Raises RunError for the first teacher that cannot compute them.
    """
    if objective.opd_objective == "sampled":
        return
    needed: Target = "hidden"
    if objective.opd_objective == "topk":
        needed = "ids" if objective.opd_topk_source == "student" else "topk"
    for teacher in teachers:
        if needed not in teacher.scorer.targets:
            can = ", ".join(sorted(teacher.scorer.targets)) or "log-probs only"
            raise RunError(
                f"teacher {teacher.plan.name} cannot compute the targets ({needed}) of opd_objective:"
                f" {objective.opd_objective}, but {can}; use opd_objective: sampled, or another teacher"
            )


def _with_answers(sample: Sample, answers: Mapping[str, TeacherAnswer], names: Sequence[str]) -> Sample:
    """Return the sample with the answers of its teachers.

    The answers are added in the order of `names`, so that sums over the teachers are reproducible.
    """
    columns = {**sample.columns, **{logprobs_column(name): answer.logprobs for name, answer in answers.items()}}
    for column in [logprobs_column(name) for name in names]:
        if column in columns:
            columns[column] = columns.pop(column)
    alignments = {name: answer.alignment for name, answer in answers.items() if answer.alignment}
    columns |= {chunks_column(name): alignment.credits for name, alignment in alignments.items()}
    targets = {**sample.teacher_targets, **{name: a.targets for name, a in answers.items() if a.targets}}
    return changed(
        sample,
        columns=columns,
        teacher_targets={name: targets[name] for name in names if name in targets},
        alignments={**sample.alignments, **alignments} if alignments else sample.alignments,
    )
