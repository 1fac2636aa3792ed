"""A run is refused before it starts if a prompt lacks a teacher or a reward that the run needs."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_assets import write
from transformers import PreTrainedTokenizerBase

from roll_opd.config.plan import (
    DataPlan,
    Layout,
    MegatronPlan,
    MicroBatchLimits,
    ModelPlan,
    RewardPlan,
    RewardTerm,
    TeacherPlan,
)
from roll_opd.data.data_checks import TagRows, check_coverage, unused_warnings
from roll_opd.data.dataset import open_prompts
from roll_opd.data.row_formats import DataError

WORKER = MegatronPlan("teacher", ModelPlan("model"), (0,), Layout(), MicroBatchLimits())
TEACHER = TeacherPlan("t", WORKER, 1.0, tags=("math", "code"))
MATH = RewardPlan("math", (RewardTerm("math_rule", "math_rule"),), tags=("math",))
CODE = RewardPlan("code", (RewardTerm("judge", "my.judge"),), tags=("code",))
ANSWERED = TagRows(0, ())
LACKING = TagRows(4, ("a:1", "a:2", "a:3"))
NEEDING = {"math_rule"}


def test_a_data_set_knows_its_tags_and_rows_without_answers(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "1", "tag": "math", "ground_truth": 1}, *({"prompt": "1", "tag": "math"} for _ in range(4))]
    late = write(tmp_path / "late.jsonl", "", {"prompt": "1", "tag": "code"}, {"prompt": "1", "ground_truth": "2"})
    files = (str(write(tmp_path / "a.jsonl", *rows)), str(late))
    prompts, _ = open_prompts(DataPlan(files=files, prompt_length=8), tokenizer)
    assert prompts.by_tag() == {
        "math": TagRows(4, tuple(f"{files[0]}:{line}" for line in (2, 3, 4))),
        "code": TagRows(1, (f"{late}:2",)),
        "math_rule": ANSWERED,
    }


def test_a_domain_that_a_row_names_must_be_that_of_its_tag(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [
        {"prompt": "1", "tag": "math", "domain": "math", "ground_truth": "1"},
        {"prompt": "1", "tag": "math", "domain": "algebra", "ground_truth": "1"},  # no reward has this name
        {"prompt": "1", "tag": "math", "domain": ["code"], "ground_truth": "1"},
        {"prompt": "1", "tag": "code", "domain": "math"},
    ]
    file = str(write(tmp_path / "a.jsonl", *rows))
    pq.write_table(pa.Table.from_pylist([{**rows[3]}]), tmp_path / "b.parquet")
    for name, line in ((file, 4), (str(tmp_path / "b.parquet"), 1)):
        tags = open_prompts(DataPlan((name,), prompt_length=8), tokenizer)[0].by_tag()
        check_coverage("pure", (TEACHER,), (), tags, {}, NEEDING)
        check_coverage("pure", (TEACHER,), (MATH,), tags, {}, NEEDING)
        with pytest.raises(DataError) as refused:
            check_coverage("pure", (TEACHER,), (MATH, CODE), tags, {}, NEEDING)
        assert str(refused.value).startswith(
            f"rows of the training data with tag 'code' name the domain 'math' ({name}:{line}), but "
            "rewards.code has the tag: move it to rewards.math.tag_included"
        )


def test_roles_without_a_row_in_the_data_are_warned_of() -> None:
    named = {"teacher all": None, "teacher sums": ("sums", "odd"), "rewards.code": ("code", "sql"), "rewards.x": ("x",)}
    assert unused_warnings(named, ("sums", "math")) == [
        "rewards.code is never used: no row of the data has one of the tags 'code', 'sql' (tags of the data: 'sums',"
        " 'math')",
        "rewards.x is never used: no row of the data has the tag 'x' (tags of the data: 'sums', 'math')",
    ]


@pytest.mark.parametrize("mode", ["pure", "mixed", "rl"])
def test_covered_prompts_pass(mode: str) -> None:
    teachers = () if mode == "rl" else (TEACHER,)
    training = {"math": ANSWERED, "code": LACKING}  # a user's own worker may do without an answer
    check_coverage(mode, teachers, (MATH, CODE), training, training, NEEDING)
    check_coverage("pure", (TEACHER,), (), {"math": LACKING}, {}, NEEDING)
    check_coverage("pure", (TEACHER,), (MATH,), {"math": LACKING, "code": LACKING}, {"math": ANSWERED}, NEEDING)
    check_coverage(mode, teachers, (), {"math": LACKING}, {"math": LACKING}, NEEDING, scored_by_workflow=True)


@pytest.mark.parametrize("mode", ["pure", "mixed", "rl"])
def test_tags_without_teacher_or_reward_are_refused(mode: str) -> None:
    teachers = () if mode == "rl" else (TEACHER,)
    with pytest.raises(DataError) as refused:
        training, validation = {"poem": ANSWERED, "math": LACKING}, {"song": ANSWERED, "math": LACKING}
        check_coverage(mode, teachers, (MATH, CODE), training, validation, NEEDING)
    found = str(refused.value).splitlines()
    expected = ["no reward accepts tag 'song' of the validation data", "4 rows of the validation data"]
    if mode != "pure":
        reward = "no reward accepts tag 'poem' of the training data"
        expected = [reward, "4 rows of the training data with tag 'math' have no ground_truth", *expected]
    if mode != "rl":
        expected = ["no teacher accepts tag 'poem' of the training data", *expected]
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))
    assert (
        "math_rule needs: a:1, a:2, a:3, ...; add ground truths or remove the rows; for rows of a workflow, name"
        in found[-1]
    )
