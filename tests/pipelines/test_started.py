"""The messages of a run about its start."""

from types import SimpleNamespace
from typing import Any

import pytest

from roll_opd.pipelines.start_run import started


@pytest.mark.parametrize(
    ("roles", "reported"),
    [
        ({}, "student and inference engines"),
        ({"teachers": ("a",)}, "student, teacher and inference engines"),
        ({"teachers": ("a", "b"), "reference": 1}, "student, teachers, reference and inference engines"),
        ({"critic": 1}, "student, critic and inference engines"),
        ({"rollout": None}, "the student"),
        ({"rollout": None, "reference": 1}, "student and reference policy"),
    ],
)
def test_models_that_a_run_does_not_have_are_not_listed(roles: dict[str, Any], reported: str) -> None:
    plan = {"rollout": 1, "teachers": (), "reference": None, "critic": None, **roles}
    assert started(SimpleNamespace(**plan)) == reported  # type: ignore[arg-type]
