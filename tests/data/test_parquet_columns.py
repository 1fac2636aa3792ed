"""A Parquet file, of which only some columns are read, gives the same prompts as JSONL or a JSON array."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import ContextPlan, DataPlan
from roll_opd.data.dataset import columns_needed, open_prompts

ASK, ANSWER = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}
WORKED = ContextPlan(name="t", key="teacher.context", prompt_length=64, hint="{worked} {steps}", system_prompt="{who}")
OTHERS = {"level": 3, "worked": "one and two", "steps": ["a", "b"], "who": "You add.", "test_cases": [{"in": "1"}]}
TOOL = {"type": "function", "function": {"name": "add"}}

CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "experience": ({}, [{"messages": [ASK]}, {"prompt": "1+2="}]),
    "hint": ({"contexts": (WORKED,)}, [{"messages": [ASK]}]),
    "tools": ({"on_bad_row": "drop"}, [{"messages": [ASK], "tools": [TOOL]}, {"messages": [ASK]}]),
    "functions": ({"on_bad_row": "drop"}, [{"messages": [ASK], "functions": [TOOL["function"]]}, {"messages": [ASK]}]),
    "images": ({"on_bad_row": "drop"}, [{"messages": [ASK], "images": ["x.png"]}, {"messages": [ASK]}]),
    "variables": ({}, [{"messages": [ASK], "chat_template_kwargs": {"enable_thinking": False}}]),
    "task": ({"schema": "task"}, [{"question": "1+2=", "answer": "3"}]),
    "named task": ({"schema": "task", "columns": {"ground_truth": "answer"}}, [{"question": "1+2=", "answer": 3.5}]),
    "named": ({"columns": {"prompt": "question", "id": "uid"}}, [{"question": "1+2=", "uid": "7"}]),
    "sft": ({"schema": "sft"}, [{"messages": [ASK, ANSWER]}, {"prompt": "1+2=", "response": "3"}]),
    "weights": ({"schema": "sft"}, [{"messages": [ASK, ANSWER], "weight": weight} for weight in (0, 1)]),
    "history": ({"schema": "sft"}, [{"instruction": "1+2=", "output": "3", "history": [["a", "b"]]}]),
    "dpo": ({"schema": "dpo"}, [{"prompt": [ASK], "chosen": "3", "rejected": "4"}]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_format_gives_the_same_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, case: str) -> None:
    fields, rows = CASES[case]
    fields = {**fields, "columns": FrozenDict(fields.get("columns", {}))}
    rows = [{**row, **OTHERS} for row in rows]
    lines = [json.dumps(row) for row in rows]
    files = {name: tmp_path / name for name in ("rows.parquet", "rows.jsonl", "rows.json")}
    files["rows.jsonl"].write_text("\n".join(lines))
    files["rows.json"].write_text("[" + ",\n".join(lines) + "]")
    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow takes those of the first row
    pq.write_table(pa.Table.from_pylist([names | row for row in rows]), files["rows.parquet"])
    found = {}
    for name, file in files.items():
        prompts, report = open_prompts(DataPlan((str(file),), 512, **fields), tokenizer)
        digests = [entry["digest"] for entry in prompts.fingerprint()]
        read = prompts.all()
        reported = [warning.replace(str(file), "") for warning in report.warnings]
        parts = [[part.tolist() for part in (p.tokens, *p.answers, *p.teacher_prompts.values())] for p in read]
        found[name] = (digests, parts, [p.extra["level"] for p in read], report.bad_counts, reported)
    assert found["rows.parquet"] == found["rows.jsonl"] == found["rows.json"]
    assert found["rows.jsonl"][1]


def test_columns_for_rewards_only_are_skipped() -> None:
    assert "test_cases" not in (columns_needed(DataPlan((), 1)) or ())
    assert columns_needed(DataPlan((), 1, schema="task")) is None
