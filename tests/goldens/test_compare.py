"""The comparison of golden records finds every changed leaf, names it, and follows a table of renamed leaves."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compare import ABSENT, Renamed, compared, first_gap
from recording import read, read_run, write

HERE = Path(__file__).parent
RECORD = {
    "command": ["start.py", "a=1"],
    "metrics": [{"step": 1, "opd/kl": 0.5, "actor/loss": -0.0}, {"step": 2, "opd/kl": 0.25, "actor/loss": 1.0}],
    "samples": [
        {"step": 1, "id": "a#0", "tokens": [1, 2, 3], "teacher_logprobs": {"teacher": [-0.5, None]}},
        {"step": 2, "id": "b#0", "tokens": [4, 5], "teacher_logprobs": {"teacher": [-1.5, math.nan]}},
    ],
    "prompts": [{"step": 1, "ids": ["a#0"]}, {"step": 2, "ids": ["b#0"]}],
    "weights": {"hf:w": {"sha256": "0a", "dtype": "F32", "shape": [2], "first": [0.0, 1.0]}},
}


def changed(value: Any) -> Iterator[Any]:
    """Yield copies of a value with one leaf changed each, however deep."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            for other in changed(value[key]):
                copied = copy.deepcopy(value)
                copied[key] = other
                yield copied
    elif isinstance(value, str):
        yield f"{value}x"
    elif value is None:
        yield 0.0
    else:
        yield -value if value == 0 and isinstance(value, float) else 7
        yield float(value) if isinstance(value, int) else None  # another type, though equal


def test_a_record_equals_itself() -> None:
    assert compared(RECORD, copy.deepcopy(RECORD), Renamed()) == []


@pytest.mark.parametrize("part", ["metrics", "samples", "prompts", "weights"])
def test_every_changed_leaf_is_found_and_named(part: str) -> None:
    rows = RECORD[part]
    for number, row in enumerate(rows) if isinstance(rows, list) else rows.items():
        for name in row:
            for value in changed(row[name]):
                other = copy.deepcopy(RECORD)
                other[part][number][name] = value
                [found] = compared(RECORD, other, Renamed())
                assert found.part == part and found.name == (number if part == "weights" else name), value
                assert repr(found.one) != repr(found.other)


def test_the_earliest_step_comes_first_and_rows_are_counted() -> None:
    other = copy.deepcopy(RECORD)
    other["metrics"][1]["opd/kl"] = 9
    other["weights"]["hf:w"]["sha256"] = "0b"
    for sample in other["samples"]:
        sample["teacher_logprobs"]["teacher"][0] = 0.125
    texts = [str(found) for found in compared(RECORD, other, Renamed())]
    assert texts[0] == "samples teacher_logprobs: step 1 a#0.teacher[0]: -0.5 -> 0.125 (differs 2 times)"
    assert texts[1].startswith("metrics opd/kl: step 2 row 1: 0.25 -> 9")
    assert texts[2].startswith("weights hf:w: sha256: '0a' -> '0b'")


def test_missing_rows_names_and_elements_differ() -> None:
    for part in ("metrics", "samples", "prompts"):
        assert [found.name for found in compared(RECORD, {**RECORD, part: RECORD[part][:1]}, Renamed())] == ["rows"]
    other = {**RECORD, "weights": {}}
    assert [(found.name, found.other) for found in compared(RECORD, other, Renamed())] == [("hf:w", ABSENT)]
    assert first_gap([1, 2], [1]) == ("[1]", 2, ABSENT) and first_gap({"a": 1}, {}) == (".a", 1, ABSENT)


def test_names_of_a_table_are_followed_and_their_values_still_compared(tmp_path: Path) -> None:
    other = json.loads(json.dumps(RECORD).replace("opd/kl", "distill/kl").replace('"tokens"', '"token_ids"'))
    for row in other["metrics"]:
        row["new"] = 1
        del row["actor/loss"]
    assert len(compared(RECORD, other, Renamed())) == 6
    table = {"metrics": {"opd/*": "distill/*"}, "samples": {"tokens": "token_ids"}}
    path = tmp_path / "table.json"
    path.write_text(json.dumps({**table, "added": ["metrics:new"], "removed": ["metrics:actor/loss"]}))
    assert compared(RECORD, other, Renamed.of_file(path)) == []
    other["metrics"][0]["distill/kl"] = 3
    assert [found.name for found in compared(RECORD, other, Renamed.of_file(path))] == ["distill/kl"]
    path.write_text('{"metric": {}}')
    with pytest.raises(ValueError, match="unknown metric"):
        Renamed.of_file(path)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "other")]
    for file in files:
        write(RECORD, file)
    assert first_gap(read(files[0]), RECORD) is None and files[0].read_bytes() == files[1].read_bytes()


def test_the_command_distinguishes_equal_different_and_not_comparable(tmp_path: Path) -> None:
    machine = {"cores": 2, "libraries": {"torch": "1"}}
    other = copy.deepcopy(RECORD)
    other["samples"][0]["tokens"][1] = 9
    for name, record, facts in (("a", RECORD, machine), ("b", other, machine), ("c", RECORD, {"cores": 4})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "machine.json").write_text(json.dumps(facts))
        write(record, tmp_path / name / "pure.json.gz")

    def command(one: str, two: str) -> tuple[int, str]:
        words = [sys.executable, str(HERE / "compare.py"), str(tmp_path / one), str(tmp_path / two)]
        done = subprocess.run(words, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert command("a", "a") == (0, "pure: equal\n")
    code, said = command("a", "b")
    assert code == 1 and "samples tokens: step 1 a#0[1]: 2 -> 9 (differs 1 times)" in said
    code, said = command("a", "c")
    assert code == 2 and "cores: 2, 4" in said


def test_times_of_a_run_are_left_out_and_tensors_have_digests(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    place = tmp_path / "checkpoints/step_2/hf"
    place.mkdir(parents=True)
    tensor = torch.tensor([[1.5, -2.0]])
    save_file({"half": tensor.bfloat16(), "whole": tensor}, place / "model.safetensors")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 0.5, "system/tps": 3, "actor/loss": 0.5}\n')
    found = read_run(tmp_path, ["command"])
    assert found["metrics"] == [{"step": 1, "actor/loss": 0.5}] and found["samples"] == []
    assert found["weights"].keys() == {"hf/model.safetensors:half", "hf/model.safetensors:whole"}
    for tensors in found["weights"].values():
        assert tensors["first"] == [1.5, -2.0] and tensors["shape"] == [1, 2]
