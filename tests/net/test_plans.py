"""Comparison of two records of plans: different values count, different texts do not."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from plan_records import message, paths_of_difference, plain, without_roots
from plans import compare

PLAN: dict[str, Any] = {
    "plan": {"batch": {"steps": 10}, "roles": ["student"]},
    "fields": {"max_steps": 10},
    "messages": [message("warning", "max_steps: is large (run.yaml:3)")],
}


def changed(**parts: Any) -> dict[str, Any]:
    return {"a": PLAN | parts}


@pytest.mark.parametrize(
    ("later", "different"),
    [
        (changed(), 0),
        (changed(plan={"batch": {"steps": 11}, "roles": ["student"]}), 1),
        (changed(fields={"max_steps": 11}), 1),
        (changed(fields={"steps": 10}), 1),
        (changed(messages=[]), 1),
        (changed(messages=[message("problem", "max_steps: is large")]), 1),
        (changed(messages=[message("warning", "steps: is large")]), 1),
        (changed(messages=[message("warning", "max_steps: is big")]), 0),
        ({}, 1),
        (changed() | {"new": PLAN}, 0),
    ],
)
def test_plans_fields_severities_and_keys_count_and_texts_do_not(later: dict[str, Any], different: int) -> None:
    assert compare({"a": PLAN}, later, {}) == different


def test_renamed_fields_are_equal_and_rewritten_texts_become_a_table(tmp_path: Path) -> None:
    later = changed(fields={"steps": 10}, messages=[message("warning", "max_steps: is big")])
    assert compare({"a": PLAN}, later, {"max_steps": "steps"}, tmp_path / "texts.csv") == 0
    rows = list(csv.reader((tmp_path / "texts.csv").read_text().splitlines()))
    assert rows == [["old", "new", "times"], ["max_steps: is large (run.yaml:3)", "max_steps: is big", "1"]]


def test_records_name_no_directory_of_their_run(tmp_path: Path) -> None:
    record = {"path": f"{tmp_path}/test_of_this0/model", "text": f"'{tmp_path}/test_of_this0' is no file"}
    assert without_roots(record, [tmp_path]) == {"path": "{root}/model", "text": "'{root}' is no file"}


def test_differences_are_named_by_their_paths() -> None:
    one, other = {"a": [1, {"b": 2}], "c": 3}, {"a": [1, {"b": 4}], "d": 3}
    assert list(paths_of_difference(one, other)) == [".a[1].b: 2 -> 4", ".c: only before", ".d: only after"]
    assert json.dumps(plain({"set": {2, 1}, "path": Path("x")})) == '{"set": ["1", "2"], "path": "x"}'
