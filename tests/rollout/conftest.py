"""Prompt sources from real files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from roll_opd.config.plan import DataPlan
from roll_opd.data.dataset import open_prompts
from roll_opd.data.prompt_source import MixedSource, PromptSource

MODEL = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"
ROWS = [{"id": f"p{n}", "prompt": f"{n}+{n}=", "tag": "math_rule", "ground_truth": "1"} for n in range(23)]
ANSWERED = [{"id": f"a{n}", "prompt": f"{n}+1=", "response": f"{n + 1}", "tag": "math_rule"} for n in range(7)]


@pytest.fixture(scope="session")
def make_source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], PromptSource]:
    """Return a function that makes a new source of 23 prompts."""
    prompts = _opened(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS, "experience")
    return lambda: PromptSource(prompts, seed=5)


@pytest.fixture(scope="session")
def make_mixed_source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], MixedSource]:
    """Return a function that makes a new source of 23 prompts and 7 rows with answers."""
    directory = tmp_path_factory.mktemp("mixed_rows")
    prompts = _opened(directory / "rows.jsonl", ROWS, "experience")
    answered = _opened(directory / "answered.jsonl", ANSWERED, "sft")
    return lambda: MixedSource(prompts, answered, seed=5)


def _opened(file: Path, rows: list[dict], schema: str):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = DataPlan((str(file),), prompt_length=32, schema=schema)
    return open_prompts(plan, AutoTokenizer.from_pretrained(MODEL))[0]
