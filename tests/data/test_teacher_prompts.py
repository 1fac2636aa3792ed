"""Prompts of teachers with their own context: texts, tokens, and bad rows without a value or above the limit."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_assets import write
from transformers import PreTrainedTokenizerBase

from roll_opd.config.plan import ContextPlan, DataPlan
from roll_opd.data.dataset import open_prompts
from roll_opd.data.prompt_source import PromptSource
from roll_opd.data.row_formats import BadRow, DataError, Row, parse_row
from roll_opd.data.teacher_prompts import names_in, read_row

ASKED = {"id": "a", "messages": [{"role": "user", "content": "2+2"}], "ground_truth": 4, "steps": ["2", {"and": 2}]}
Open = Callable[..., tuple]


def context(**keys: object) -> ContextPlan:
    return ContextPlan(**{"name": "t", "key": "teacher.t", "prompt_length": 64, **keys})


def contents(row: Row) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row.messages]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"hint": "It is {ground_truth}."}, [("user", "2+2\n\nIt is 4.")]),
        ({"hint": "It is {ground_truth}: {prompt}"}, [("user", "It is 4: 2+2")]),
        ({"hint": r"\boxed{} {{x}} {steps}"}, [("user", '2+2\n\n\\boxed{} {x} ["2", {"and": 2}]')]),
        ({"hint": r"\boxed{{{ground_truth}}}"}, [("user", "2+2\n\n\\boxed{4}")]),
        ({"system_prompt": "{tag}/{id}"}, [("system", "math_rule/a"), ("user", "2+2")]),
    ],
)
def test_a_conversation_as_a_teacher_reads_it(keys: dict, expected: list) -> None:
    assert contents(read_row(context(**keys), parse_row(ASKED, "f"))) == expected


def test_the_hint_is_behind_the_last_question_and_the_system_message_is_replaced() -> None:
    turns = [("system", "old"), ("user", "1+1"), ("assistant", "2"), ("user", "2+2")]
    row = parse_row({**ASKED, "messages": [dict(zip(("role", "content"), turn, strict=True)) for turn in turns]}, "f")
    found = contents(read_row(context(hint="4!", system_prompt="new"), row))
    assert found == [("system", "new"), *turns[1:3], ("user", "2+2\n\n4!")]


def test_a_hint_for_a_plain_prompt_must_mark_its_place() -> None:
    row = parse_row({"prompt": "2+2=", "ground_truth": "4"}, "f")
    assert read_row(context(hint="(4)\n{prompt}"), row).prompt == "(4)\n2+2="
    for keys, said in (({"hint": "(4)"}, "{prompt}"), ({"system_prompt": "x"}, "cannot have a system_prompt")):
        with pytest.raises(BadRow) as caught:
            read_row(context(**keys), row)
        assert said in caught.value.detail


def test_names_in_braces() -> None:
    assert names_in(r"{a} {{b}} \frac{}{2} {c_1}{ d}") == {"a", "c_1"}


def test_tokens_of_each_teacher_by_tag(opened: Open, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The prompt's tokens are the same as without teachers; a row with another tag has no tokens of this teacher."""
    file = write(tmp_path / "rows.jsonl", ASKED, {**ASKED, "id": "b", "tag": "other"})
    contexts = (
        context(name="all", hint="It is {ground_truth}."),
        context(name="some", template="chatml", tags=("other",)),
    )
    (one, other), _ = opened(file, contexts=contexts)
    (plain, _), _ = opened(file)
    assert np.array_equal(one.tokens, plain.tokens) and not plain.teacher_prompts
    assert set(one.teacher_prompts) == {"all"} and set(other.teacher_prompts) == {"all", "some"}
    wanted = "<|im_start|>user\n2+2\n\nIt is 4.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(one.teacher_prompts["all"]) == wanted and one.teacher_prompts["all"].dtype == np.int64


def test_a_teachers_own_tokenizer_writes_its_own_template(
    opened: Open, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    saved = tokenizer.chat_template
    tokenizer.chat_template = "{{ messages[0]['content'] }}?"
    tokenizer.save_pretrained(tmp_path / "teacher")
    tokenizer.chat_template = saved
    own = context(template="native", tokenizer=str(tmp_path / "teacher"))
    (one,), _ = opened(write(tmp_path / "rows.jsonl", ASKED), contexts=(own,))
    assert tokenizer.decode(one.teacher_prompts["t"]) == "2+2?"


def test_rows_without_a_value_of_the_hint_are_bad(opened: Open, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ASKED, {**ASKED, "id": "b", "steps": None}, {**ASKED, "id": "c", "steps": ""})
    hinted = (context(hint="{steps}"),)
    with pytest.raises(DataError, match=r"(?s)2 x no value for a teacher's hint.*teacher\.t: no 'steps' in the row"):
        opened(file, contexts=hinted)
    prompts, report = opened(file, contexts=hinted, on_bad_row="drop")
    assert [prompt.id for prompt in prompts] == ["a"] and report.bad == 2


def test_prompts_that_are_too_long_with_their_hint(opened: Open, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ASKED, {**ASKED, "id": "b", "ground_truth": "4" * 90})
    hinted = (context(hint="{ground_truth}"),)
    prompts, report = opened(file, contexts=hinted)
    assert [prompt.id for prompt in prompts] == ["a"]
    assert "teacher.t, but its prompt_length is 64" in report.summary()
    with pytest.raises(DataError, match="raise the teacher's `prompt_length` or set"):
        opened(file, contexts=hinted, on_long_prompt="refuse")


def test_another_hint_is_another_run_and_another_solution_another_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write(tmp_path / "rows.jsonl", ASKED)

    def source(*contexts: ContextPlan) -> PromptSource:
        return PromptSource(open_prompts(DataPlan((str(file),), 64, contexts=contexts), tokenizer)[0], seed=1)

    hinted, bare = source(context(hint="{steps}")), source()
    source(context(hint="{steps}")).load_state_dict(hinted.state_dict())
    for other in (bare, source(context(hint="{ground_truth}"))):
        with pytest.raises(DataError, match="a hint"):
            other.load_state_dict(hinted.state_dict())
    write(file, {**ASKED, "steps": ["other"]})
    assert bare.take(1)[0].id == "a"
    with pytest.raises(DataError, match="has changed since the start of the run"):
        hinted.take(1)
