"""The rows and the grading of examples/real, without models."""

import importlib
import json
import sys
from pathlib import Path

import pytest

REAL = Path(__file__).resolve().parents[1] / "examples" / "real"


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch):
    """Imports modules of examples/real by name; they are removed after the test."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(REAL))
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(REAL)):
            del sys.modules[name]


def test_held_out_countries_and_wordings_are_never_trained_on(real, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_recovery.py", str(tmp_path)])
    real("make_recovery").main()
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"recover_{name}.jsonl").read_text().splitlines()]
        for name in ("sft", "train", "val")
    }
    asked = {name: [json.loads(row["messages"])[0]["content"] for row in found] for name, found in rows.items()}
    assert {name: len(found) for name, found in rows.items()} == {"sft": 48, "train": 176, "val": 60}
    assert not set(asked["val"]) & {*asked["train"], *asked["sft"]}
    held_out = {row["ground_truth"] for row in rows["val"] if row["tag"] == "capitals"}
    assert len(held_out) == 22
    assert not held_out & {row["ground_truth"] for row in rows["train"]}
    assert all(row["response"].lower() == row["ground_truth"].lower() + "." for row in rows["sft"])


def test_an_answer_is_correct_with_the_whole_word_only(real) -> None:
    is_correct = real("answers").is_correct
    given = ("The capital is Rome.", "rome", "Romero.", "Paris", "")
    assert [is_correct(answer, "Rome") for answer in given] == [True, True, False, False, False]


def test_accuracies_are_counted_per_tag(real) -> None:
    rows = [{"tag": tag, "ground_truth": "Oslo"} for tag in ("a", "a", "b")]
    assert real("answers").shares(rows, ["Oslo.", "Bern.", "Oslo"]) == {
        "a": {"correct": 1, "questions": 2, "accuracy": 0.5},
        "b": {"correct": 1, "questions": 1, "accuracy": 1.0},
    }
