"""A student whose samples are guesses: the teacher's log-probs of these samples give no verdict on the teacher."""

import math

import numpy as np
import pytest

from roll_opd.teachers.logprob_checks import Readings, Settings, checks

VOCAB, TOKENS = 320, 300


def verdict(student: float, teacher: float, text: str = "samples") -> tuple[str, str]:
    """Return verdict and meaning for mean log-probs of a text by student and teacher."""
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
        prompted=none if text != "prompts" else ~none,
        answered=none if text != "answers" else ~none,
        ended=none,
    )
    found = checks(readings, Settings(1.0, True, VOCAB))
    row = next(row for row in found if row.check == f"mean log-prob, {text}")
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
    assert ("a uniform distribution (-ln V), so a sound teacher and a wrong" in meaning) == (wanted == "warning")


@pytest.mark.parametrize("text", ["prompts", "answers"])
@pytest.mark.parametrize(
    ("student", "teacher", "wanted"),
    [
        (-9.12, -13.8, "not judged: the student is no better than a uniform distribution (-ln V)"),
        (-9.12, -9.0, "not judged: the student is no better than a uniform distribution (-ln V)"),
        (-4.3, -17.0, "not judged: the student is no better than a uniform distribution (-ln V)"),
        (-0.2, -0.9, "mean log-probs in nats; a sound teacher is at most 1.5 nats below the student"),
    ],
)
def test_text_that_the_student_cannot_predict_is_not_judged(
    text: str, student: float, teacher: float, wanted: str
) -> None:
    """For any log-prob of the teacher, the verdict is not based on the student's log-prob."""
    assert verdict(student, teacher, text) == ("ok", wanted)
