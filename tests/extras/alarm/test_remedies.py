"""The advice of alarms names only keys that have an effect in the run."""

import pytest

from roll_opd.extras.alarm.divergence_alarm import Remedies
from roll_opd.extras.alarm.remedies import remedies
from roll_opd.planner.load_plan import load_plan

FOLLOWS, HINT, REFERENCE = "follows_student.ema_decay", "a more detailed hint", "use_kl_loss"


def texts(found: Remedies) -> tuple[str, str]:
    return found.against_collapse(), found.against_length()


@pytest.mark.parametrize(
    ("config", "pure", "overrides", "slower", "shorter"),
    [
        ("onpolicy_distill", True, (), set(), {"max_len_mask"}),
        ("onpolicy_distill", True, ("+max_len_mask=true",), set(), set()),
        ("hints", True, (), {HINT}, {"max_len_mask"}),
        ("hints", True, ("+teacher.follows_student={ema_decay: 0.9}",), {HINT, FOLLOWS}, {"max_len_mask"}),
        (
            "rlvr_opd",
            False,
            (),
            {REFERENCE, "kl_loss_coef"},
            {REFERENCE, "kl_loss_coef", "max_len_mask", "length_penalty"},
        ),
    ],
)
def test_advice_for_the_demo(config: str, pure: bool, overrides: tuple, slower: set, shorter: set) -> None:
    collapse, length = texts(remedies(load_plan("demo", config, overrides, pure=pure)))
    words = (FOLLOWS, HINT, REFERENCE, "kl_loss_coef", "max_len_mask", "length_penalty")
    assert {word for word in words if word in collapse} == slower
    assert {word for word in words if word in length} == shorter
    assert "learning_rate" in collapse and "response_length" in length
