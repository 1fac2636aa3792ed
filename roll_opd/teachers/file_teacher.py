"""Make samples from teacher files: given answers with the teacher's log-probs, and its top-k as targets of the loss.

A file has scores only for its own answers, so it cannot be a `TeacherScorer`. Instead, the pipeline `offline_distill`
draws the rows of the file.
"""

from collections.abc import Sequence

import numpy as np

from roll_opd.config.plan import ObjectivePlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.teacher_scores import TeacherScores, narrowed
from roll_opd.samples.sample import Sample, changed
from roll_opd.samples.sample_columns import logprobs_column
from roll_opd.teachers.kinds import TeacherStart, register_teacher
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
