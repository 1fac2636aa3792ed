"""Metrics of teachers with another tokenizer.

They show how much the student's tokens and the teacher's tokens of the same answers differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll_opd.samples.sample import Sample


@dataclass(frozen=True)
class Cut:
    """Statistics of how student and teacher split the same text into tokens.

    The text consists of the action tokens. All fractions are 0 if there are no tokens.
    """

    chunks: int
    chunked_bytes: float  # fraction of the covered bytes in chunks that are not one student token and one teacher token
    longest_chunk: int  # student tokens
    uncovered: float  # fraction of action tokens without a teacher log-prob
    teacher_tokens: float  # teacher tokens in all chunks divided by student tokens in them


def cut_of(samples: Sequence[Sample], teacher: str) -> Cut:
    """Return the statistics of the samples that the teacher has scored."""
    scored = [sample for sample in samples if teacher in sample.alignments]
    sizes = np.concatenate([np.zeros((0, 3), np.int64), *(sample.alignments[teacher].sizes for sample in scored)])
    students, teachers, lengths = sizes.T
    is_chunk = (students != 1) | (teachers != 1)
    tokens = sum(sample.action_tokens for sample in scored)
    uncovered = sum(sample.alignments[teacher].uncovered for sample in scored)
    return Cut(
        chunks=len(sizes),
        chunked_bytes=float(lengths[is_chunk].sum() / max(lengths.sum(), 1)),
        longest_chunk=int(students.max(initial=0)),
        uncovered=uncovered / max(tokens, 1),
        teacher_tokens=float(teachers.sum() / max(students.sum(), 1)),
    )


def alignment_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics `opd/alignment/TEACHER/...` for each teacher with another tokenizer.

    docs/metrics.md describes these metrics.
    """
    found: dict[str, float] = {}
    for teacher in dict.fromkeys(name for sample in samples for name in sample.alignments):
        cut = cut_of(samples, teacher)
        found |= {
            f"opd/alignment/{teacher}/chunked_bytes": cut.chunked_bytes,
            f"opd/alignment/{teacher}/longest_chunk": float(cut.longest_chunk),
            f"opd/alignment/{teacher}/uncovered": cut.uncovered,
            f"opd/alignment/{teacher}/teacher_tokens": cut.teacher_tokens,
        }
    return found
