"""Rows with answers: all accepted forms, errors, and the resulting tokens."""

import json
from pathlib import Path

import numpy as np
import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan
from roll_opd.data.dataset import open_prompts
from roll_opd.data.prompt_source import PromptSource
from roll_opd.data.row_formats import BadRow, DataError
from roll_opd.data.supervised_rows import NO_ANSWER, OTHER_PROMPT, SAME_ANSWER, parse_answered
from roll_opd.data.templates import load_tokenizer

STUDENT = str(Path(__file__).parents[2] / "examples" / "demo" / "models" / "student")
ASK, RIGHT, WRONG = (
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "assistant", "content": "3"},
)
SFT_ROWS = [
    {"messages": [ASK, RIGHT]},
    {"messages": json.dumps([ASK, RIGHT])},
    {"messages": [ASK], "response": "2"},
    {"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]},
    {"conversations": [{"from": "human", "value": "1+1="}], "response": "2"},
    {"prompt": [ASK], "completion": [RIGHT]},
    {"instruction": "1+1=", "output": "2"},
    {"instruction": "1+1=", "input": "not read, no query_key names it", "output": "2"},
]
DPO_ROWS = [
    {"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]},
    {"chosen": [ASK, RIGHT], "rejected": [ASK, WRONG]},
    {"prompt": "1+1=", "chosen": [ASK, RIGHT], "rejected": [ASK, WRONG]},
    {"instruction": "1+1=", "chosen": "2", "rejected": "3"},
    {"messages": [ASK], "chosen": RIGHT, "rejected": WRONG},
    {
        "conversations": [{"from": "human", "value": "1+1="}],
        "chosen": {"from": "gpt", "value": "2"},
        "rejected": {"from": "gpt", "value": "3"},
    },
]


def plan(schema: str, *files: Path, length: int = 128, **fields: object) -> DataPlan:
    return DataPlan(tuple(map(str, files)), length, schema=schema, length_key="sequence_length", **fields)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("schema", "rows"), [("sft", SFT_ROWS), ("dpo", DPO_ROWS)])
def test_every_form_of_a_row_gives_the_same_tokens(tmp_path: Path, schema: str, rows: list[dict]) -> None:
    tokenizer = load_tokenizer(STUDENT)
    prompts, _ = open_prompts(plan(schema, write(tmp_path / "rows.jsonl", rows)), tokenizer)
    for prompt in prompts.all():
        assert tokenizer.decode(prompt.tokens) == "<|user|>1+1=<|end|><|assistant|>"
        assert [tokenizer.decode(answer) for answer in prompt.answers] == ["2<|end|>", "3<|end|>"][
            : len(prompt.answers)
        ]
        assert len(prompt.answers) == {"sft": 1, "dpo": 2}[schema]


@pytest.mark.parametrize(
    "other",
    [
        {"response": "other"},
        {"completion": "other", "output": "other"},
        {"messages": [{"role": "user", "content": "other"}]},
        {"messages": [{"role": "user", "content": "other"}, {"role": "assistant", "content": "other"}]},
    ],
)
def test_named_columns_go_before_the_usual_ones(other: dict) -> None:
    columns = FrozenDict({"instruction": "question", "output": "solution"})
    row = parse_answered({"question": "1+1=", "solution": "2", **other}, "0", plan("sft", columns=columns))
    assert (row.messages, row.answers) == ((ASK,), (RIGHT,))


@pytest.mark.parametrize("messages", [[ASK, RIGHT], json.dumps([ASK, RIGHT])])
def test_messages_may_be_named_as_the_prompt(messages: object) -> None:
    row = parse_answered({"messages": messages}, "0", plan("sft", columns={"instruction": "messages"}))
    assert (row.messages, row.answers) == ((ASK,), (RIGHT,))


def test_a_named_answer_stands_for_the_last_turn_of_messages() -> None:
    row = parse_answered({"messages": [ASK, WRONG], "solution": "2"}, "0", plan("sft", columns={"output": "solution"}))
    assert (row.messages, row.answers) == ((ASK,), (RIGHT,))


def test_prompt_tokens_are_a_prefix_of_the_whole_conversation() -> None:
    tokenizer = load_tokenizer(STUDENT)
    prompts, _ = open_prompts(plan("sft", Path(STUDENT).parents[1] / "data" / "sft_val.jsonl", limit=20), tokenizer)
    for prompt in prompts.all():
        whole = np.concatenate([prompt.tokens, *prompt.answers])
        text = tokenizer.decode(whole)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == whole.tolist()
        assert prompt.tokens[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")
        assert (whole == tokenizer.eos_token_id).sum() == 2  # the user's turn and the answer


def test_a_plain_prompt_is_followed_by_its_answer_and_the_end(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(STUDENT)
    rows = write(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "response": "2"}])
    (prompt,) = open_prompts(plan("sft", rows), tokenizer)[0].all()
    assert tokenizer.decode(np.concatenate([prompt.tokens, *prompt.answers])) == "1+1=2<|end|>"


def test_template_text_after_the_end_token_is_not_learned(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(STUDENT)
    rows = write(tmp_path / "rows.jsonl", SFT_ROWS[:1])
    (prompt,) = open_prompts(plan("sft", rows, template="chatml"), tokenizer)[0].all()
    assert tokenizer.decode(prompt.answers[0]) == "2<|im_end|>"


def test_a_template_whose_prompt_is_no_prefix_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(STUDENT)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    )
    with pytest.raises(DataError, match="renders the prompt differently if its answer follows"):
        open_prompts(plan("sft", write(tmp_path / "rows.jsonl", SFT_ROWS[:1])), tokenizer)


@pytest.mark.parametrize(
    ("schema", "row", "kind"),
    [
        ("sft", {"messages": [ASK]}, NO_ANSWER),
        ("sft", {"messages": [ASK, {"role": "assistant", "content": " "}]}, "empty messages or prompt"),
        ("sft", {"response": "2"}, "without a prompt"),
        ("sft", {"prompt": 3, "response": "2"}, "a field of the wrong type"),
        ("sft", {"prompt": {"x": 1}, "response": "2"}, "a field of the wrong type"),
        ("sft", {"prompt": "1+1=", "response": "\ud800"}, "a field of the wrong type"),
        ("dpo", {"prompt": True, "chosen": "2", "rejected": "3"}, "a field of the wrong type"),
        (
            "dpo",
            {"prompt": "1+1=", "chosen": {"from": ["x"], "value": "2"}, "rejected": "3"},
            "a field of the wrong type",
        ),
        ("sft", {"prompt": "1+1=", "response": 2}, "a field of the wrong type"),
        ("dpo", {"prompt": [ASK], "chosen": [RIGHT]}, NO_ANSWER),
        ("dpo", {"prompt": [ASK], "chosen": [RIGHT], "rejected": [RIGHT]}, SAME_ANSWER),
        ("dpo", {"chosen": [ASK, RIGHT], "rejected": [WRONG, ASK, WRONG]}, OTHER_PROMPT),
        ("dpo", {"prompt": [ASK], "chosen": [ASK], "rejected": [WRONG]}, NO_ANSWER),
    ],
)
def test_bad_rows(schema: str, row: dict, kind: str) -> None:
    with pytest.raises(BadRow) as found:
        parse_answered(row, "a", plan(schema))
    assert found.value.kind == kind


CALLED = [
    {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{}"}]},
    {"role": "tool", "content": "2"},
]


@pytest.mark.parametrize("schema", ["sft", "dpo"])
def test_an_answer_may_continue_its_prompt(schema: str) -> None:
    """As TRL's completions do; messages that repeat the prompt, or its end, are not taken twice."""
    system = {"role": "system", "content": "You add."}

    def roles(prompt: object, *before: dict) -> list[str]:
        answers = {"completion": [*before, RIGHT], "chosen": [*before, RIGHT], "rejected": [*before, WRONG]}
        row = parse_answered({"prompt": prompt, **answers}, "0", plan(schema))
        return [message["role"] for message in row.messages]

    assert roles([ASK], *CALLED) == ["user", "assistant", "tool"]
    assert roles([system, ASK]) == roles([system, ASK], ASK) == roles([system, ASK], system, ASK) == ["system", "user"]
    assert roles([ASK], ASK, *CALLED) == ["user", "assistant", "tool"]
    # the prompt's column has the last turn alone, or other blanks around it
    assert (
        roles([ASK], system, ASK) == roles([{"role": "user", "content": "1+1=\n"}], system, ASK) == ["system", "user"]
    )
    assert roles([ASK], ASK, RIGHT, ASK) == ["user", "assistant", "user"]
    assert roles("1+1=", ASK) == ["user"]
    for prompt, before in (("1+1=", CALLED), ([ASK], [{"role": "user", "content": "other"}])):
        with pytest.raises(BadRow, match=r"continues|differ"):
            roles(prompt, *before)


def test_the_error_for_a_missing_answer_names_the_columns_looked_for() -> None:
    with pytest.raises(BadRow, match=r"none of the columns messages, q, prompt, conversations;"):
        parse_answered({"instruction": "1+1=", "output": "2"}, "0", plan("sft", columns={"instruction": "q"}))


def test_ignored_columns_of_an_instruction_row_are_warned_of(tmp_path: Path) -> None:
    """Once for each column, with the rows of all files; empty ones and those of messages are not meant."""
    tokenizer = load_tokenizer(STUDENT)
    rows = [
        {"instruction": "1+1=", "input": "x", "system": "You add.", "output": "2"},
        {"instruction": "1+1=", "input": "y", "system": " ", "output": "2"},
        {"instruction": "1+1=", "input": "", "output": "2"},
        {"messages": [ASK, RIGHT], "input": "x"},
    ]
    one, two = write(tmp_path / "one.jsonl", rows), write(tmp_path / "two.jsonl", rows[1:2])

    def warnings(schema: str, *files: Path, **columns: str) -> tuple[str, ...]:
        return open_prompts(plan(schema, *files, columns=FrozenDict(columns)), tokenizer)[1].warnings

    system = f"1 row has `system`, which is ignored; system_key: system adds it ({one})"
    assert warnings("sft", one, two) == (
        f"3 rows have `input`, which is ignored; query_key: input adds it ({one} and 1 more files)",
        system,
    )
    assert warnings("sft", one, input="input") == (system,)
    assert warnings("sft", one, input="input", system="system") == ()
    pairs = write(tmp_path / "pairs.jsonl", [{"instruction": "1+1=", "input": "x", "chosen": "2", "rejected": "3"}])
    assert warnings("dpo", pairs) == (f"1 row has `input`, which is ignored; write it in `instruction` ({pairs})",)


def test_columns_of_other_names() -> None:
    columns = FrozenDict({"instruction": "q", "input": "more", "system": "who", "output": "a"})
    row = parse_answered({"q": "1+1=", "more": "?", "who": "You add.", "a": "2"}, "x", plan("sft", columns=columns))
    assert [dict(message) for message in row.messages] == [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "1+1=\n?"},
    ]
    assert row.answers[0]["content"] == "2"


def test_the_longest_answer_counts_and_parquet_is_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": text} for text in ("3", "3" * 40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prompts, report = open_prompts(plan("dpo", tmp_path / "rows.parquet", length=32), load_tokenizer(STUDENT))
    assert (len(prompts), report.bad, report.longest) == (1, 1, 45)
    assert "sequence_length=32" in report.summary()
    with pytest.raises(DataError, match="sequence_length"):
        open_prompts(
            plan("dpo", tmp_path / "rows.parquet", length=32, on_long_prompt="refuse"), load_tokenizer(STUDENT)
        )


def test_a_run_with_changed_answers_is_not_resumed(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "rows.jsonl", load_tokenizer(STUDENT)
    write(path, [{"prompt": "1+1=", "response": "2"}])
    state = PromptSource(open_prompts(plan("sft", path), tokenizer)[0], 0).state_dict()
    write(path, [{"prompt": "1+1=", "response": "3"}])
    with pytest.raises(DataError, match="differ from those with which this run was saved"):
        PromptSource(open_prompts(plan("sft", path), tokenizer)[0], 0).load_state_dict(state)
