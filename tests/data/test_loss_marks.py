"""Loss weights of turns and rows: 0 excludes them, unsupported values cause a warning."""

from pathlib import Path
from typing import Any

import pytest
from data_assets import write
from transformers import PreTrainedTokenizerBase

from roll_opd.config.plan import DataPlan
from roll_opd.data.data_checks import NOT_LEARNED
from roll_opd.data.dataset import open_prompts
from roll_opd.data.messages import MARKS, SPANS
from roll_opd.data.row_formats import BadRow, DataError
from roll_opd.data.supervised_rows import parse_answered

ASK, WRONG, RIGHT = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "4"}, "3"


def forms(schema: str, mark: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows whose answer `4` has the mark, as a turn and as a row."""
    if schema == "dpo":
        others = {"prompt": [ASK], "rejected": "5"}
        return [{**others, "chosen": [{**WRONG, **mark}]}, {**others, "chosen": "4", **mark}]
    turns = [{"from": "human", "value": "1+2="}, {"from": "gpt", "value": "4", **mark}]
    return [
        {"messages": [ASK, {**WRONG, **mark}]},
        {"conversations": turns},
        {"prompt": [ASK], "completion": [{**WRONG, **mark}]},
        {"messages": [ASK, WRONG], **mark},
        {"instruction": "1+2=", "output": "4", **mark},
    ]


@pytest.mark.parametrize("schema", ["sft", "dpo"])
@pytest.mark.parametrize("mark", MARKS)
def test_loss_weight_zero_excludes_an_answer(mark: str, schema: str) -> None:
    plan = DataPlan((), 1, schema=schema)
    for value in (0, 0.0, False, "0", "false"):
        for row in forms(schema, {mark: value}):
            with pytest.raises(BadRow, match=mark) as found:
                parse_answered(row, "0", plan)
            assert found.value.kind == NOT_LEARNED
    for value in (1, True, "1", None, 1.0):
        for row in forms(schema, {mark: value}):
            answer = parse_answered(row, "0", plan)
            assert (dict(answer.answers[0]), answer.unread) == (WRONG, ())


def test_excluded_rows_do_not_stop_a_run(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"messages": [ASK, {**WRONG, "weight": 0}]}, {"messages": [ASK, {**WRONG, "content": RIGHT, "weight": 1}]}]
    file = write(tmp_path / "rows.jsonl", *rows)
    prompts, report = open_prompts(DataPlan((str(file),), 64, schema="sft"), tokenizer)
    assert [tokenizer.decode(prompt.answers[0]) for prompt in prompts.all()] == ["3<|im_end|>"]
    assert f"1 x {NOT_LEARNED}: {file}:1 (weight 0 of its answer)" in report.summary()
    with pytest.raises(DataError, match=NOT_LEARNED):
        open_prompts(DataPlan((str(write(tmp_path / "none.jsonl", rows[0])),), 64, schema="sft"), tokenizer)


def test_an_earlier_turn_with_loss_weight_one_is_the_answer() -> None:
    first, last = {**WRONG, "content": RIGHT, "weight": 1}, {**WRONG, "weight": 0}
    row = parse_answered({"messages": [ASK, first, ASK, last]}, "0", DataPlan((), 1, schema="sft"))
    assert (row.messages, row.answers[0]["content"]) == ((ASK,), RIGHT)
    row = parse_answered({"messages": [ASK, last, ASK, first]}, "0", DataPlan((), 1, schema="sft"))
    assert (row.messages, row.answers[0]["content"]) == ((ASK, WRONG, ASK), RIGHT)


@pytest.mark.parametrize("schema", ["sft", "dpo"])
def test_unsupported_loss_weights_warn_once(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, schema: str) -> None:
    marks = [{"weight": 0.5}, {"loss_mask": [0, 1]}, *({name: [{"begin_offset": 0}]} for name in SPANS)]
    rows = [row for mark in marks for row in forms(schema, mark)]
    _, report = open_prompts(DataPlan((str(write(tmp_path / "rows.jsonl", *rows)),), 64, schema=schema), tokenizer)
    for mark in marks:
        (name,) = mark
        count = len(forms(schema, mark))
        assert sum(w.startswith(f"{count} rows have `{name}`, which is ignored;") for w in report.warnings) == 1
    assert len(report.warnings) == len(marks)


def test_runs_that_sample_ignore_loss_weights() -> None:
    row = {"messages": [ASK, {**WRONG, "weight": 0}], "loss_mask": 0}
    assert parse_answered(row, "0", DataPlan((), 1)).messages == (ASK,)
