"""When the alarms of a distillation sound, and when what looks like a collapse is learning."""

import numpy as np
import pytest

from roll_opd.data.experience import Experience
from roll_opd.tracking.collapse import AGREEMENT, ENTROPY, LENGTH, REWARD, WINDOW, CollapseAlarm, alarms
from roll_opd.tracking.metrics import opd_metrics

FIRST = {ENTROPY: 1.0, AGREEMENT: 0.6, LENGTH: 20.0, REWARD: 0.3}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, set()),
        ({ENTROPY: 0.19}, {"entropy"}),
        ({ENTROPY: 0.21}, set()),
        ({LENGTH: 9.0}, {"length"}),
        ({LENGTH: 41.0}, {"length"}),
        ({AGREEMENT: 0.93}, {"agreement"}),
        ({ENTROPY: 0.0, LENGTH: 1.0, AGREEMENT: 1.0, REWARD: 0.1}, {"entropy", "length", "agreement"}),
        ({ENTROPY: 0.0, LENGTH: 1.0, AGREEMENT: 1.0, REWARD: 0.9}, set()),  # it has learned
    ],
)
def test_what_sounds_an_alarm(change: dict, expected: set) -> None:
    assert {name for name, _ in alarms(FIRST, FIRST | change, is_itself=True)} == expected
    other = {name for name, _ in alarms(FIRST, FIRST | change, is_itself=False)}
    assert other == expected - {"agreement"}  # to become as another teacher is the aim


def test_what_was_learned_and_is_lost() -> None:
    """Half of the gain, whatever is left of it; also of a teacher that is another model."""
    for last, sounds in ((0.7, False), (0.56, False), (0.54, True), (0.3, True)):
        for is_itself in (True, False):
            found = dict(alarms(FIRST, FIRST | {REWARD: last}, is_itself=is_itself, best=0.8))
            assert ("reward" in found) == sounds
    assert not dict(alarms(FIRST, FIRST | {REWARD: 0.2}, is_itself=True, best=0.34))  # there was no gain
    alarm = CollapseAlarm(is_itself=False)
    rows = [FIRST] * WINDOW + [FIRST | {REWARD: 0.9}] * WINDOW + [FIRST] * WINDOW
    assert [bool(alarm.after(row)) for row in rows].index(True) == 2 * WINDOW + WINDOW // 2


def test_without_a_reward_only_a_self_teacher_is_suspected() -> None:
    first = {name: value for name, value in FIRST.items() if name != REWARD}
    last = first | {ENTROPY: 0.0, LENGTH: 5.0, AGREEMENT: 1.0}
    assert {name for name, _ in alarms(first, last, is_itself=True)} == {"entropy", "length", "agreement"}
    assert not list(alarms(first, last, is_itself=False))


def test_an_alarm_sounds_once_and_names_the_numbers() -> None:
    alarm = CollapseAlarm(is_itself=True)
    early = [text for _ in range(WINDOW) for text in alarm.after(FIRST)]
    later = [alarm.after(FIRST | {ENTROPY: 0.1}) for _ in range(3 * WINDOW)]
    assert not early and not any(later[: WINDOW - 1])
    (text,) = later[WINDOW - 1]
    assert not any(later[WINDOW:])
    for part in ("opd/student_entropy", "from 1 to 0.1", "0.3, now 0.3", "follows_student.decay"):
        assert part in text


def test_a_step_without_numbers_sounds_no_alarm() -> None:
    for nothing in (None, float("nan")):
        alarm = CollapseAlarm(is_itself=True)
        rows = [dict(FIRST), dict.fromkeys(FIRST, nothing)] * (2 * WINDOW)
        assert not any(alarm.after(row) for row in rows)


def test_agreement_estimates_what_two_distributions_share() -> None:
    """Over samples of s, the mean of min(1, t / s) tends to sum of min(s, t) = 1 - total variation."""
    rng = np.random.default_rng(0)
    s, t = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    tokens = rng.choice(6, size=100_000, p=s)
    logprobs = [np.log(p)[tokens].astype(np.float32) for p in (s, t)]
    made = Experience(
        "0", "0", "", "", np.concatenate([[0], tokens]), 1, np.ones(len(tokens), bool), logprobs[0], "stop", 0,
        teacher_logprobs={"t": logprobs[1]},
    )  # fmt: skip
    found = opd_metrics([made])
    assert found[AGREEMENT] == pytest.approx(np.minimum(s, t).sum(), abs=5e-3)
    assert found[ENTROPY] == pytest.approx(-(s * np.log(s)).sum(), abs=1e-2)
