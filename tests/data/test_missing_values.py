"""Missing values: all spellings are equivalent, in every format and column."""

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from data_assets import write

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan
from roll_opd.data.row_files import first_tags
from roll_opd.data.row_formats import DEFAULT_TAG, EMPTY, NO_PROMPT, BadRow, parse_row, parse_task
from roll_opd.data.supervised_rows import NO_ANSWER, parse_answered
from roll_opd.workflows.workflow_interface import FormatConfig, Task

NULLS = [None, math.nan, np.float64("nan"), pd.NaT, pd.NA, Decimal("nan")]
MISSING = [*NULLS, math.inf, -math.inf, "", "  ", "\n\t"]
ASK = {"role": "user", "content": "1+2="}


@pytest.mark.parametrize("value", MISSING, ids=repr)
def test_a_missing_value_is_none(value: Any) -> None:
    named = {"id": value, "tag": value}
    row = parse_row({"prompt": "1+2=", "ground_truth": value, **named}, "rows:1")
    assert (row.id, row.tag, row.ground_truth) == ("rows:1", DEFAULT_TAG, None)
    task = parse_task(
        {"question": "1+2=", "id": value, "tag": value, "answer": value}, "rows:1", {"ground_truth": "answer"}
    )
    assert (task.id, task.tag, task.ground_truth) == ("rows:1", DEFAULT_TAG, None)
    assert Task(raw_task={"answer": value}, format_args=FormatConfig(response_key="answer")).truth is None
    assert parse_row({"messages": value, "prompt": [ASK]}, "0").messages == (ASK,)
    plan = DataPlan((), 1, schema="sft")
    row = parse_answered({"prompt": "1+2=", "response": value, "completion": value, "output": "3"}, "0", plan)
    assert row.answers[0]["content"] == "3"


@pytest.mark.parametrize("value", MISSING, ids=repr)
def test_missing_required_values_make_a_row_bad(value: Any) -> None:
    for schema, row in (
        ("experience", {"prompt": value}),
        ("sft", {"prompt": "1+2=", "response": value}),
        ("dpo", {"prompt": "1+2=", "chosen": value, "rejected": "4"}),
    ):
        if isinstance(value, float) and math.isinf(value):
            continue  # no text, and no null either: a field of the wrong type
        with pytest.raises(BadRow) as found:
            parse_answered(row, "0", DataPlan((), 1, schema=schema))
        assert found.value.kind in (EMPTY, NO_PROMPT, NO_ANSWER)


def test_texts_and_numbers_are_values() -> None:
    for value, text in (
        ("nan", "nan"),
        ("None", "None"),
        (0, "0"),
        (3.0, "3"),
        (4.2e1, "42"),
        (Decimal("42.00"), "42"),
        (np.float16(42), "42"),
        (np.int64(42), "42"),
        (-0.0, "0"),
        (2.5, "2.5"),
        (Decimal("3.10"), "3.10"),
        ("42.0", "42.0"),
        (" 3", " 3"),
    ):
        assert parse_row({"prompt": "x", "ground_truth": value}, "0").ground_truth == text


def test_tags_are_counted_as_they_are_read(tmp_path: Path) -> None:
    tags = [math.nan, "", None, "sums", 3]
    file = write(tmp_path / "rows.jsonl", *({"prompt": "x", "tag": tag} for tag in tags))
    assert first_tags(DataPlan((str(file),), 8)) == ({DEFAULT_TAG, "sums"}, True)


def test_nulls_of_pandas_and_arrow_are_those_of_json(tmp_path: Path, opened: Any) -> None:
    frame = pd.DataFrame({"prompt": ["a", "b", None, "c"], "ground_truth": [1.5, math.nan, 2.0, math.inf]})
    frame["tag"] = ["x", None, "", math.nan]
    frame.to_parquet(tmp_path / "rows.parquet")
    write(tmp_path / "rows.jsonl", *frame.astype(object).to_dict("records"))
    read = [opened(tmp_path / f"rows.{suffix}", on_bad_row="drop") for suffix in ("parquet", "jsonl")]
    assert read[0][0] == read[1][0] and read[0][1].bad_counts == read[1][1].bad_counts
    assert [(p.tag, p.ground_truth) for p in read[0][0]] == [("x", "1.5"), (DEFAULT_TAG, None), (DEFAULT_TAG, None)]


def test_columns_of_other_names_may_be_missing_too() -> None:
    columns = FrozenDict({"prompt": "question", "messages": "", "id": "uid"})
    row = parse_row({"question": "1+2=", "uid": math.nan}, "rows:1", columns)
    assert (row.prompt, row.id) == ("1+2=", "rows:1")
