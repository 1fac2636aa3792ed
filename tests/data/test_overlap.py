"""Validation rows that are also training rows are counted; compared with a loop over the tokens of both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_assets import write

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan, StreamPlan
from roll_opd.data.data_checks import overlap_warning
from roll_opd.data.dataset import PromptSet, open_prompts


def _ask(number: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"what is {number}"}], **more}


@pytest.fixture
def opened_as(tokenizer: Any) -> Callable[..., PromptSet]:
    def opened_as(*files: Path, **options: Any) -> PromptSet:
        plan = DataPlan(**{"files": tuple(map(str, files)), "prompt_length": 64, "columns": FrozenDict(), **options})
        return open_prompts(plan, tokenizer)[0]

    return opened_as


def test_shared_prompts_are_counted(tmp_path: Path, opened_as: Callable[..., PromptSet]) -> None:
    """With any id, tag, ground truth, order and place."""
    train = write(tmp_path / "train.jsonl", *(_ask(number, id=f"t{number}") for number in range(40)))
    more = write(tmp_path / "more.jsonl", *(_ask(number) for number in range(100, 110)))
    rows = [_ask(number, id=f"v{number}", tag="held", ground_truth="3") for number in (203, 105, 39, 7, 207, 7)]
    val = write(tmp_path / "val.jsonl", *rows)
    training, validation = opened_as(train, more), opened_as(val)
    learned = {prompt.tokens.tobytes() for prompt in training.all()}
    count = sum(prompt.tokens.tobytes() in learned for prompt in validation.all())
    assert count == 4
    said = overlap_warning(validation, [training])
    assert (
        f"{count} of 6 validation rows (67 %) are also training rows: {val}:2 has the same prompt as {more}:6"
        in str(said)
    )
    assert overlap_warning(validation, [opened_as(more), opened_as(train)]) == said
    assert overlap_warning(opened_as(write(tmp_path / "new.jsonl", _ask(500))), [training]) is None


def test_one_file_for_both_is_one_warning(tmp_path: Path, opened_as: Callable[..., PromptSet]) -> None:
    file = write(tmp_path / "rows.jsonl", *(_ask(number) for number in range(3)))
    assert "3 of 3 validation rows (100 %)" in str(overlap_warning(opened_as(file), [opened_as(file)]))


def test_the_same_text_in_another_form(tmp_path: Path, opened_as: Callable[..., PromptSet]) -> None:
    """The tokens that the model reads are compared; another template gives other tokens."""
    plain = write(
        tmp_path / "plain.jsonl", {"prompt": "<|im_start|>user\nwhat is 1<|im_end|>\n<|im_start|>assistant\n"}
    )
    chat = write(tmp_path / "chat.jsonl", _ask(1))
    assert "1 of 1" in str(overlap_warning(opened_as(chat), [opened_as(plain)]))
    assert overlap_warning(opened_as(chat, template="base", prompt_length=1000), [opened_as(plain)]) is None


@pytest.mark.parametrize("schema", ["sft", "dpo"])
def test_rows_with_answers(tmp_path: Path, opened_as: Callable[..., PromptSet], schema: str) -> None:
    """Another answer to the same prompt is no new prompt."""
    answers = [{"completion": "4"}, {"completion": "5"}]
    if schema == "dpo":
        answers = [{"chosen": "4", "rejected": "5"}, {"chosen": "6", "rejected": "7"}]
    train = write(tmp_path / "train.jsonl", *(_ask(number, **answers[0]) for number in range(4)))
    val = write(tmp_path / "val.jsonl", _ask(2, **answers[1]), _ask(9, **answers[1]))
    said = overlap_warning(opened_as(val, schema=schema), [opened_as(train, schema=schema)])
    assert f"1 of 2 validation rows (50 %) are also training rows: {val}:1 has the same prompt as {train}:3" in str(
        said
    )


def test_tasks_of_workflows(tmp_path: Path, opened_as: Callable[..., PromptSet]) -> None:
    train = write(tmp_path / "train.jsonl", {"question": "a", "uid": 1}, {"question": "b", "uid": 2})
    val = write(tmp_path / "val.jsonl", {"uid": 3, "question": "b"}, {"question": "c", "uid": 4})
    options = {"schema": "task", "columns": FrozenDict({"id": "uid"}), "prompt_length": 10**6}
    said = overlap_warning(opened_as(val, **options), [opened_as(train, **options)])
    assert f"1 of 2 validation rows (50 %) are also training rows: {val}:1 has the same prompt as {train}:2" in str(
        said
    )


def test_rows_that_are_never_drawn_are_not_learned_from(tmp_path: Path, opened_as: Callable[..., PromptSet]) -> None:
    train = write(tmp_path / "train.jsonl", _ask(1, tag="a"), _ask(2, tag="b"))
    val = write(tmp_path / "val.jsonl", _ask(2))
    drawn = opened_as(train, streams=(StreamPlan("a", 1.0, ("a",)), StreamPlan("b", 0.0, ("b",))))
    assert overlap_warning(opened_as(val), [drawn]) is None
    assert overlap_warning(opened_as(val), [opened_as(train)])
