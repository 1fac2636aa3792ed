"""The prompt in the script that a run prints at its end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll_opd.pipelines.sample_texts import example_prompt
from roll_opd.planner.load_plan import load_plan
from roll_opd.tracking.results_table import loading


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        (
            {"messages": [{"role": "system", "content": "+"}, {"role": "user", "content": "4+5=\nNow."}]},
            "4+5=\\nNow.",
        ),
        ({"prompt": 'Say "9".'}, 'Say \\"9\\".'),
        ({"messages": [{"role": "system", "content": "Nothing is asked."}]}, "504+766="),  # the next row
    ],
)
def test_the_script_asks_what_the_first_held_out_row_asks(tmp_path: Path, row: dict[str, Any], asked: str) -> None:
    rows = tmp_path / "rows.jsonl"
    second = Path("examples/demo/data/val.jsonl").read_text().splitlines()[1]
    rows.write_text(f"{json.dumps(row)}\n{second}\n")
    plan = load_plan("demo", "rlvr_opd", [f"validation.data_args.file_name={rows}"])
    assert f'prompt = "{asked}"' in loading(".", example_prompt(plan))


@pytest.mark.extras
def test_the_script_of_other_data(tmp_path: Path) -> None:
    """Tasks of a workflow have arbitrary columns; games have no rows, and a file may be missing."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "How many?", "ground_truth": "3"}\n')
    words = ["workflow=simple_workflow", f"validation.data_args.file_name={rows}", "prompt_key=question"]
    assert example_prompt(load_plan("demo", "rlvr_opd", words)) == "How many?"
    rows.unlink()
    assert example_prompt(load_plan("examples/games", "frozen_lake")) == "Hello"
    plan = load_plan("demo", "sft", pipeline="sft")
    gone = replace(plan, validation=None, data=replace(plan.data, files=(str(rows),)))
    assert example_prompt(gone) == "Hello"
