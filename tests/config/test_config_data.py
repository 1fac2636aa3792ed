"""The data of a configuration: files, directories and patterns, templates by tag, interleaving."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roll_opd.config.plan import DataPlan, RunPlan, StreamPlan
from roll_opd.data.row_files import ROWS_SCANNED, find_files, first_tags

DATA = "student_train.data_args"
PROBS = f"{DATA}.domain_interleave_probs"


def write_rows(path: Path, *tags: str | None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": "a", "tag": tag}) + "\n" for tag in tags))
    return path


@pytest.fixture
def two_domains(root: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Changes that give the base configuration rows of two domains."""
    write_rows(root / "train.jsonl", "math", "gsm8k", "code")
    return {
        "rewards.math_rule.tag_included": ["math", "gsm8k"],
        "rewards.code_sandbox": {"worker_cls": "math_rule", "tag_included": ["code"]},
    }


def test_files_directories_and_patterns(root: Path) -> None:
    files = [write_rows(root / "data" / name, "t") for name in ("b.jsonl", "a.jsonl", "c.json", "d.parquet")]
    write_rows(root / "data" / "notes.txt", "t")
    assert find_files(str(root / "data"), None) == sorted(files)
    assert find_files(str(root / "data" / "*.jsonl"), None) == sorted(files[:2])
    assert find_files(str(files[0]), "elsewhere") == [files[0]]
    assert find_files("b.jsonl", str(root / "data")) == [files[0]]
    assert find_files("?.jsonl", str(root / "data")) == sorted(files[:2])
    (root / "empty").mkdir()
    for name, message in (
        (str(root / "empty"), r"has no files named \*.jsonl or"),
        ("no-*.jsonl", "no file 'no-"),
        ("no.jsonl", "dataset_dir 'elsewhere'"),
    ):
        with pytest.raises(ValueError, match=message):
            find_files(name, "elsewhere")


def test_tags_are_found_in_every_kind_of_file(root: Path) -> None:
    tags: list[str | None] = ["math", None, "code"]
    jsonl = write_rows(root / "rows.jsonl", *tags)
    pq.write_table(pa.table({"tag": tags, "prompt": ["a"] * 3}), root / "rows.parquet")
    pq.write_table(pa.table({"prompt": ["a"] * 3}), root / "untagged.parquet")
    for file in (jsonl, root / "rows.parquet"):
        assert first_tags(DataPlan((str(file),), 8)) == ({"math", "math_rule", "code"}, True)
        assert first_tags(DataPlan((str(file),), 8, limit=1)) == ({"math"}, False)
    assert first_tags(DataPlan((str(root / "untagged.parquet"),), 8)) == ({"math_rule"}, True)
    long = write_rows(root / "long.jsonl", *["math"] * ROWS_SCANNED, "late")
    assert first_tags(DataPlan((str(long),), 8)) == ({"math"}, False)


def test_columns_are_called_as_the_data_calls_them(root: Path, plan: Callable[..., RunPlan]) -> None:
    row = {"q": "a", "kind": "math", "tag": "x", "chat": [{"role": "user", "content": "a"}]}
    (root / "train.jsonl").write_text(json.dumps(row) + "\n")
    held_out = {"validation": {"data_args": {"file_name": str(root / "train.jsonl"), "messages": "chat"}}}
    run = plan({f"{DATA}.prompt": "q", f"{DATA}.tag": "kind", f"{DATA}.id": "id", **held_out})
    assert run.data.columns == {"messages": "", "prompt": "q", "tag": "kind"}
    assert run.validation.data.columns == {"messages": "chat", "prompt": "q", "tag": "kind"}
    assert first_tags(run.data) == ({"math"}, True)
    assert plan({f"{DATA}.prompt": ..., f"{DATA}.messages": "messages"}).data.columns == {"tag": "kind"}


def test_templates_by_tag(plan: Callable[..., RunPlan]) -> None:
    run = plan({"tag_to_template": {"math": "qwen3_nothink"}, "global_template": "qwen3", f"{DATA}.template": "chatml"})
    assert (run.data.template, run.data.tag_templates) == ("qwen3", {"math": "qwen3_nothink"})
    assert any(f"{DATA}.template: chatml has no effect with global_template qwen3" in text for text in run.warnings)
    assert plan({"global_template": ...}).data.template == "chatml"
    assert plan({f"{DATA}.template": ...}).data.template == "native"


def test_an_unknown_template_names_the_nearest(problems: Callable[..., list[str]]) -> None:
    found = problems({"tag_to_template": {"math": "qwen3_nothinking", "code": "qwen3"}, f"{DATA}.template": "chat_ml"})
    assert len(found) == 2
    expected = "tag_to_template.math: 'qwen3_nothinking' is not a known template; did you mean 'qwen3_nothink'?"
    assert found[0].startswith(expected)
    assert found[1].startswith(f"{DATA}.template: 'chat_ml' is not a known template; did you mean 'chatml'?")


def test_domains_are_streams_of_their_rewards_tags(plan: Callable[..., RunPlan], two_domains: dict) -> None:
    run = plan({**two_domains, PROBS: {"math_rule": 0.75, "code_sandbox": "0.25"}})
    assert run.data.streams == (
        StreamPlan("math_rule", 0.75, ("math", "gsm8k")),
        StreamPlan("code_sandbox", 0.25, ("code",)),
    )
    assert plan({PROBS: ...}).data.streams == ()


def test_without_such_a_reward_a_domain_is_a_tag(plan: Callable[..., RunPlan], two_domains: dict) -> None:
    run = plan({"rewards": ..., PROBS: {"math": 0.33, "gsm8k": 0.33, "code": 0.33}})
    assert [(stream.name, stream.tags) for stream in run.data.streams] == [
        ("math", ("math",)),
        ("gsm8k", ("gsm8k",)),
        ("code", ("code",)),
    ]
    assert sum(stream.weight for stream in run.data.streams) == pytest.approx(1)


def test_files_are_streams(root: Path, plan: Callable[..., RunPlan]) -> None:
    files = [write_rows(root / "one" / "rows.jsonl", "math"), write_rows(root / "two" / "rows.jsonl", "math")]
    write_rows(root / "two" / "more.jsonl", "math")
    names = [str(files[0]), str(root / "two")]
    for written in ("0.25,0.75", [0.25, 0.75], ["0.25", 0.75]):
        run = plan({f"{DATA}.file_name": names, f"{DATA}.interleave_probs": written})
        assert run.data.streams == (
            StreamPlan("rows.jsonl", 0.25, files=(str(files[0]),)),
            StreamPlan("two", 0.75, files=(str(root / "two" / "more.jsonl"), str(files[1]))),
        )
    same = [str(file) for file in files]
    run = plan({f"{DATA}.file_name": same})
    assert [stream.name for stream in run.data.streams] == same  # the same file name twice: the paths differ


def test_rolls_one_probability_is_no_interleaving(root: Path, plan: Callable[..., RunPlan], two_domains: dict) -> None:
    """ROLL's files set domain_interleave_probs to "1.0" together with several files."""
    more = write_rows(root / "more.jsonl", "math")
    files = {f"{DATA}.file_name": [str(root / "train.jsonl"), str(more)], f"{DATA}.interleave_probs": "1.0"}
    assert plan({**two_domains, **files}).data.streams == ()
    both = plan({PROBS: {"math_rule": 0.5, "code_sandbox": 0.5}})
    assert [stream.name for stream in both.data.streams] == ["math_rule", "code_sandbox"]
    assert not any("interleave_probs" in text for text in both.warnings)
    several = plan({f"{DATA}.interleave_probs": "0.5,0.5"})
    assert any("interleave_probs has no effect with domain_interleave_probs" in text for text in several.warnings)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({PROBS: {"math_rule": 0.5, "code_sandbox": 0.6}}, [f"{PROBS}: 0.5, 0.6 sum to 1.1", "sum to 1"]),
        ({PROBS: {"math_rule": 1.5, "code_sandbox": -0.5}}, [f"{PROBS}.code_sandbox: ", "greater than", "-0.5"]),
        ({PROBS: {"math_rule": 0.5, "code_sandbox": "a lot"}}, [f"{PROBS}.code_sandbox: ", "number", "a lot"]),
        ({PROBS: {"math_rule": 0.5, "code_sandbx": 0.5}}, [f"{PROBS}.code_sandbx: ", "mean 'code_sandbox'?"]),
        (
            {PROBS: {"math_rule": 0.5, "poems": 0.5}},
            [f"{PROBS}.poems: 0.5 is given to 'poems', which is neither", "Known: code,"],
        ),
        ({PROBS: {"math_rule": 0.5, "gsm8k": 0.5}}, [f"{PROBS}.gsm8k: tag 'gsm8k' also belongs to 'math_rule'"]),
        ({PROBS: [0.5, 0.5]}, [f"{PROBS}: ", "[0.5, 0.5]"]),
        ({f"{DATA}.interleave_probs": "0.5"}, ["interleave_probs: 0.5 sum to 0.5"]),
        (
            {f"{DATA}.interleave_probs": "0.5,0.5"},
            ["2 probabilities for 1 entries of file_name; write one per entry"],
        ),
        ({f"{DATA}.interleave_probs": "0.5;0.5"}, [f"{DATA}.interleave_probs.0: ", "number", "0.5;0.5"]),
        ({f"{DATA}.interleave_probs": [1.5, -0.5]}, [f"{DATA}.interleave_probs.1: ", "greater than", "-0.5"]),
        ({f"{DATA}.dataset_dir": 3}, [f"{DATA}.dataset_dir: ", "string"]),
        ({"tag_to_template": "qwen3"}, ["tag_to_template: ", "qwen3"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_wrong_mixture_of_files_gives_one_problem(
    problems: Callable[..., list[str]], two_domains: dict, changes: dict, parts: list[str]
) -> None:
    found = problems({**two_domains, **changes})
    assert len(found) == 1
    for part in parts:
        assert part in found[0]


def test_a_file_in_two_entries_is_refused(root: Path, problems: Callable[..., list[str]]) -> None:
    write_rows(root / "data" / "rows.jsonl", "math")
    names = [str(root / "data"), str(root / "data" / "rows.jsonl")]
    found = problems({f"{DATA}.file_name": names, f"{DATA}.interleave_probs": "0.5,0.5"})
    assert len(found) == 1
    assert "rows.jsonl is in two entries of file_name" in found[0]


def test_a_domain_without_rows_is_reported_early(plan: Callable[..., RunPlan], two_domains: dict) -> None:
    two_domains["rewards.code_sandbox"]["tag_included"] = ["python"]
    run = plan({**two_domains, PROBS: {"math_rule": 0.5, "code_sandbox": 0.5}})
    assert any(f"{PROBS}.code_sandbox: no row has one of its tags (python)" in t for t in run.warnings)
    off = plan({PROBS: {"math_rule": 1, "code_sandbox": 0}})
    assert not any("no row has one of its tags" in text for text in off.warnings)
