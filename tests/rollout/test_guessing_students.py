"""A student whose own samples are guesses: its teacher's log-probs of them say nothing about the teacher."""

import math

import numpy as np
import pytest

from roll_opd.rollout.teacher_checks import Readings, Settings, checks

VOCAB, TOKENS = 320, 300
ROW = "mean log-prob, samples"


def verdict(student: float, teacher: float) -> tuple[str, str]:
    """Return verdict and meaning for mean log-probs of the samples by student and teacher."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((TOKENS, 20)), axis=1)[:, :4].astype(np.int32)
    topk = np.log(np.tile(np.float32([0.6, 0.3, 0.05, 0.02]), (TOKENS, 1)))
    of_teacher = np.full(TOKENS, teacher, np.float32)
    none = np.zeros(TOKENS, bool)
    readings = Readings(
        student_logprobs=np.full(TOKENS, student, np.float32),
        student_ids=ids,
        student_topk=topk,
        teacher_logprobs=of_teacher,
        teacher_ids=ids,
        teacher_topk=topk,
        teacher_plain=topk,
        again=of_teacher[:8],
        in_run=of_teacher,
        sampled=~none,
        prompted=none,
        answered=none,
        ended=none,
    )
    row = next(row for row in checks(readings, Settings(1.0, True, VOCAB)) if row.check == ROW)
    return row.verdict, row.meaning


@pytest.mark.parametrize(
    ("student", "teacher", "wanted"),
    [
        (-0.2, -17.0, "failed"),  # permuted ids
        (-5.6, -17.0, "warning"),  # the same beside a student that guesses; a sound teacher looks like it
        (-math.log(VOCAB), -math.log(VOCAB), "ok"),  # both are new
        (-4.6, -5.0, "ok"),
        (-4.6, -6.0, "ok"),
    ],
)
def test_what_samples_of_a_guessing_student_say(student: float, teacher: float, wanted: str) -> None:
    found, meaning = verdict(student, teacher)
    assert found == wanted
    assert ("than a guess (-ln V), so that a sound teacher and a wrong one" in meaning) == (wanted == "warning")
