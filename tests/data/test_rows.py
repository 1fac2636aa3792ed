"""Rows: every accepted form; every bad row is counted, named, and dropped or refused."""

import contextlib
import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_assets import write
from transformers import PreTrainedTokenizerBase

from roll_opd.base.frozen import FrozenDict, thaw
from roll_opd.config.plan import DataPlan
from roll_opd.data.data_checks import FILES_NAMED, NOT_ENCODABLE, DataReport
from roll_opd.data.dataset import Prompt, open_prompts
from roll_opd.data.row_files import open_file
from roll_opd.data.row_formats import (
    EMPTY,
    NO_PROMPT,
    NOT_AN_OBJECT,
    NOT_JSON,
    WRONG_TYPE,
    BadRow,
    DataError,
    Row,
    parse_row,
    parse_task,
)
from roll_opd.data.supervised_rows import parse_answered

CHAT = [{"role": "user", "content": "2+2?"}]

Opened = Callable[..., tuple[list[Prompt], DataReport]]


def parse_all(path: Path) -> list[Row]:
    file = open_file(str(path))
    return [parse_row(value, f"{path.stem}:{line}") for line, _, value in file.scan()]


def test_reads_every_form_of_a_row(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"id": 7, "tag": "math", "messages": json.dumps(CHAT), "ground_truth": 4, "source": "s", "difficulty": 0.5},
        {"messages": CHAT, "test_cases": ["x"]},
        "",
        {"prompt": "2+2="},
    )
    rows = parse_all(file)
    assert [row.id for row in rows] == ["7", "a:2", "a:4"]
    assert [row.tag for row in rows] == ["math", "math_rule", "math_rule"]
    assert rows[0].messages == rows[1].messages == tuple(CHAT)
    assert (rows[0].ground_truth, rows[0].extra) == ("4", {"source": "s", "difficulty": 0.5})
    assert rows[1].extra == {"test_cases": ("x",)}
    assert (rows[2].prompt, rows[2].messages) == ("2+2=", ())


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_of_other_names(tmp_path: Path, opened: Opened, suffix: str) -> None:
    """Also if a name has another meaning here, and if two names refer to one column."""
    rows = [
        {"uid": 3, "tag": "x", "kind": "math", "question": "1+1=", "messages": json.dumps(CHAT), "prompt": "no"},
        {"uid": 4, "tag": "y", "kind": "code", "question": "2+2=", "messages": json.dumps(CHAT), "prompt": "no"},
    ]
    file = tmp_path / f"rows.{suffix}"
    write(file, *rows) if suffix == "jsonl" else pq.write_table(pa.Table.from_pylist(rows), file)
    columns = {"id": "uid", "tag": "kind", "prompt": "question", "messages": ""}
    prompts, _ = opened(file, columns=FrozenDict(columns))
    plain, _ = opened(write(tmp_path / "plain.jsonl", *({"prompt": row["question"]} for row in rows)))
    assert [(prompt.id, prompt.tag) for prompt in prompts] == [("3", "math"), ("4", "code")]
    assert [prompt.tokens.tolist() for prompt in prompts] == [prompt.tokens.tolist() for prompt in plain]
    swapped, _ = opened(file, columns=FrozenDict({"id": "tag", "tag": "tag", "messages": "", "prompt": "messages"}))
    assert [(prompt.id, prompt.tag) for prompt in swapped] == [("x", "x"), ("y", "y")]
    with pytest.raises(DataError, match=r"none of the columns qestion, conversations; .*\n.*column names"):
        opened(file, columns=FrozenDict({"prompt": "qestion", "messages": ""}), on_bad_row="drop")


BAD_LINES = [
    (NOT_JSON, "{oops"),
    (NOT_JSON, {"messages": "[{"}),
    (NOT_JSON, "[" * 100_000),
    (NOT_AN_OBJECT, [1, 2]),
    (NO_PROMPT, {"id": "x"}),
    (NO_PROMPT, {"messages": None}),
    (WRONG_TYPE, {"messages": 3}),
    (WRONG_TYPE, {"messages": ["hello"]}),
    (WRONG_TYPE, {"messages": [{"role": "user"}]}),
    (WRONG_TYPE, {"messages": [{"from": ["human"], "value": "a"}]}),
    (WRONG_TYPE, {"messages": [{"from": {}, "value": "a"}]}),
    (WRONG_TYPE, {"messages": [{"from": "human", "value": ["a"]}]}),
    (WRONG_TYPE, {"prompt": ["a"]}),
    (WRONG_TYPE, {"prompt": "a", "tag": 5}),
    (WRONG_TYPE, {"prompt": "a", "ground_truth": {"x": 1}}),
    (WRONG_TYPE, {"prompt": "a", "id": True}),
    (WRONG_TYPE, '{"prompt": "\\ud800"}'),
    (WRONG_TYPE, '{"prompt": "a", "tag": "\\ud800"}'),
    (WRONG_TYPE, f'{{"prompt": "a", "test_cases": {"[" * 700}{"]" * 700}}}'),
    (EMPTY, {"messages": []}),
    (EMPTY, {"messages": ""}),
    (EMPTY, {"messages": [{"role": "user", "content": " "}]}),
    (EMPTY, {"prompt": "\n"}),
]


# of every JSON type, and what looks like something else
ODD = (True, 0, -1.5, 10**30, "", "x", "\ud800", "[3]", [], [None], ["x"], [[]], [{}], {}, {"x": 1}, CHAT[0], CHAT)
COLUMNS = ("id", "tag", "domain", "ground_truth", "messages", "conversations", "prompt", "test_cases")
ANSWER_COLUMNS = ("instruction", "input", "system", "response", "completion", "output", "chosen", "rejected")
IN_MESSAGES = ("role", "content", "from", "value", "name")


@pytest.mark.parametrize("schema", ["experience", "task", "sft", "dpo"])
def test_no_value_of_a_column_is_an_error(schema: str) -> None:
    """Each value gives a row or a bad row, whatever the other columns, also if keys name all columns."""
    speaker = {"from": "human", "value": "1+1="}
    answers = {"output": "2", "chosen": "2", "rejected": "3"}
    bases = [{}, {"prompt": "1+1="}, {"messages": CHAT}, {"instruction": "1+1="}, {"conversations": [speaker]}]
    names = {name: name for name in ANSWER_COLUMNS}
    for base, columns, value in itertools.product(bases, ({}, names), ODD):
        plan = DataPlan((), 1, schema=schema, columns=FrozenDict(columns))
        rows = [{**base, **answers, name: value} for name in (*COLUMNS, *ANSWER_COLUMNS)]
        turns = [{**message, name: value} for message in (*CHAT, speaker) for name in IN_MESSAGES]
        rows += [{**base, **answers, name: [turn]} for name in ("messages", "prompt", "chosen") for turn in turns]
        for row in (value, *rows):
            with contextlib.suppress(BadRow):
                assert parse_answered(row, "0", plan).id


def test_invalid_text_in_template_columns_makes_a_row_bad(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    reading = copy.deepcopy(tokenizer)
    reading.chat_template = "{% for message in messages %}{{ message['name'] }}{{ message['content'] }}{% endfor %}"
    good, bad = ([{**CHAT[0], "name": name}] for name in ("x", "\ud800"))
    file = write(tmp_path / "a.jsonl", {"messages": good}, {"messages": bad})
    prompts, report = open_prompts(DataPlan((str(file),), 64, on_bad_row="drop"), reading)
    assert (len(prompts), report.bad_counts) == (1, {NOT_ENCODABLE: 1})
    assert "half of a surrogate pair" in report.summary()


@pytest.mark.parametrize(("kind", "line"), BAD_LINES)
def test_a_bad_row_is_counted_and_named(tmp_path: Path, opened: Opened, kind: str, line: object) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "good"}, line)
    prompts, report = opened(file, on_bad_row="drop")
    assert len(prompts) == 1
    assert report.bad_counts == {kind: 1}
    assert f"{file}:2" in report.files[0].bad_examples[kind][0]
    with pytest.raises(DataError, match="on_bad_row: drop") as refused:
        opened(file)
    assert kind in str(refused.value)
    assert f"{file}:2" in str(refused.value)


def test_the_error_for_a_missing_prompt_names_the_columns_looked_for() -> None:
    for columns, said in (
        ({}, "none of the columns messages, prompt, conversations;"),
        ({"messages": "", "prompt": "Frage"}, "none of the columns Frage, conversations;"),
        ({"messages": "dialog"}, "none of the columns dialog, prompt, conversations;"),
    ):
        with pytest.raises(BadRow) as found:
            parse_row({"question": "1+1=", **({"messages": CHAT} if columns else {})}, "0", columns)
        assert found.value.kind == NO_PROMPT and found.value.detail.startswith(said)


def test_bad_rows_are_counted_in_each_file(tmp_path: Path, opened: Opened) -> None:
    first = write(tmp_path / "a.jsonl", {"prompt": "good"}, "nope", {"id": "x"})
    second = write(tmp_path / "b.jsonl", "nope", "nope", {"prompt": "good"}, {"prompt": "good"})
    _, report = opened(first, second, on_bad_row="drop")
    assert [(file.rows, file.prompts, dict(file.bad_counts)) for file in report.files] == [
        (3, 1, {NOT_JSON: 1, NO_PROMPT: 1}),
        (4, 2, {NOT_JSON: 2}),
    ]
    assert report.bad_counts == {NOT_JSON: 3, NO_PROMPT: 1}
    assert f"{first}: 2 of 3 rows" in report.summary()
    assert f"{second}: 2 of 4 rows" in report.summary()
    assert f"{second}:1 (" in report.summary()


def test_the_report_of_many_bad_rows_stays_short(tmp_path: Path, opened: Opened) -> None:
    files = [
        write(tmp_path / f"{n:02}.jsonl", {"prompt": "good"}, *["nope"] * 500 * (n == 0), "nope") for n in range(30)
    ]
    _, report = opened(*files, on_bad_row="drop")
    assert report.bad == 530
    assert "501 x not JSON" in report.summary()
    assert f"{30 - FILES_NAMED} more files: 20 rows" in report.summary()
    assert len(report.summary().splitlines()) < 3 * FILES_NAMED


def test_bytes_that_are_not_utf8_are_a_bad_row(tmp_path: Path, opened: Opened) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "with a byte order mark"}\n{"prompt": "\xff"}\n')
    prompts, report = opened(file, on_bad_row="drop")
    assert [prompt.id for prompt in prompts] == ["a:1"]
    assert report.bad_counts == {NOT_JSON: 1}


@pytest.mark.parametrize("row_group_size", [1, 2, 100])
def test_parquet_gives_the_prompts_of_the_same_jsonl(tmp_path: Path, opened: Opened, row_group_size: int) -> None:
    values = [
        {"id": "a", "messages": json.dumps(CHAT), "ground_truth": "4", "tag": "t", "test_cases": [{"in": "1"}]},
        {"id": "b", "messages": None, "ground_truth": "4", "tag": "t", "test_cases": None},
        {"id": "c", "messages": json.dumps(CHAT), "ground_truth": None, "tag": None, "test_cases": []},
        {"id": None, "messages": json.dumps(CHAT), "ground_truth": "5", "tag": "u", "test_cases": None},
    ]
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "rows.parquet", row_group_size=row_group_size)
    from_parquet = opened(tmp_path / "rows.parquet", on_bad_row="drop")
    from_jsonl = opened(write(tmp_path / "rows.jsonl", *values), on_bad_row="drop")
    assert from_parquet[0] == from_jsonl[0]
    assert [prompt.id for prompt in from_parquet[0]] == ["a", "c", "rows:4"]
    assert [prompt.extra for prompt in from_parquet[0]] == [prompt.extra for prompt in from_jsonl[0]]
    assert from_parquet[0][0].extra == {"test_cases": ({"in": "1"},)}
    assert from_parquet[1].bad_counts == from_jsonl[1].bad_counts == {NO_PROMPT: 1}


def test_parquet_with_messages_as_a_list(tmp_path: Path, opened: Opened) -> None:
    """A column of structs gives every message every key; an absent one must not reach the template as None."""
    values = [{"messages": [{"role": "user", "content": "a", "name": "x"}]}, {"messages": [*CHAT]}]
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "rows.parquet")
    assert parse_all(tmp_path / "rows.parquet")[1].messages == tuple(CHAT)
    assert len(opened(tmp_path / "rows.parquet")[0]) == 2


def test_parquet_that_cannot_be_read(tmp_path: Path, opened: Opened) -> None:
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"bad\.parquet"):
        opened(tmp_path / "bad.parquet")
    pq.write_table(pa.table({"question": ["a", "b"]}), tmp_path / "columns.parquet")
    with pytest.raises(DataError, match=f"2 x {NO_PROMPT}"):
        opened(tmp_path / "columns.parquet")


def test_ids_stay_unique_over_files(tmp_path: Path, opened: Opened) -> None:
    first = write(tmp_path / "a.jsonl", {"id": "0", "prompt": "x"}, {"id": "1", "prompt": "x"})
    second = write(tmp_path / "b.jsonl", {"id": "2", "prompt": "y"}, {"id": "0", "prompt": "y"})
    prompts, report = opened(first, second)
    assert [prompt.id for prompt in prompts] == ["0", "1", "2", "0@b.jsonl:2"]
    assert report.renamed == 1


def test_limit_takes_the_first_usable_rows(tmp_path: Path, opened: Opened) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "0"}, "bad", {"prompt": "1"}, {"prompt": "2"})
    prompts, _ = opened(file, limit=2, on_bad_row="drop")
    assert [prompt.id for prompt in prompts] == ["a:1", "a:3"]


def test_nothing_to_read_is_an_error(tmp_path: Path, opened: Opened) -> None:
    with pytest.raises(DataError, match="no usable row"):
        opened(write(tmp_path / "empty.jsonl"))
    with pytest.raises(DataError, match="all 1 rows are bad"):
        opened(write(tmp_path / "bad.jsonl", "bad"), on_bad_row="drop")
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        opened(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="file_name"):
        opened()


ASK, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SPOKEN = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK]},
        {"messages": [ASK, ANSWER]},
        {"conversations": SPOKEN},
        {"conversations": json.dumps(SPOKEN)},
        {"conversations": [ASK]},
        {"messages": SPOKEN, "prompt": "other"},
    ],
    ids=["prompt as messages", "answered", "ShareGPT", "as text", "roles", "in messages"],
)
def test_every_form_of_a_question_is_the_same_row(row: dict) -> None:
    """The assistant's last turn is an answer, which a run with a rollout does not read."""
    assert parse_row(row, "0").messages == (ASK,)
    assert parse_row(row, "0").extra == {}


def test_the_system_column_of_share_gpt_becomes_the_first_message() -> None:
    system = {"role": "system", "content": "Be brief."}
    for conversations in (SPOKEN, [{"from": "system", "value": "Be brief."}, *SPOKEN]):
        assert parse_row({"conversations": conversations, "system": "Be brief."}, "0").messages == (system, ASK)
    for other in ("", " ", None, 3, True, {"os": "linux"}):  # metadata of the row
        assert parse_row({"conversations": SPOKEN, "system": other}, "0").messages == (ASK,)
    with pytest.raises(BadRow, match="surrogate"):
        parse_row({"conversations": SPOKEN, "system": "\ud800"}, "0")


@pytest.mark.parametrize(
    "row", [{"conversations": [{"from": "narrator", "value": "x"}]}, {"conversations": [{"from": "human"}]}]
)
def test_a_conversation_without_known_speakers_or_texts_is_bad(row: dict) -> None:
    with pytest.raises(BadRow) as found:
        parse_row(row, "0")
    assert found.value.kind == WRONG_TYPE


def test_an_answer_without_a_question_is_bad() -> None:
    with pytest.raises(BadRow, match=r"no text before|empty"):
        parse_row({"messages": [ANSWER]}, "0")


def test_a_row_for_a_workflow_is_kept_whole() -> None:
    value = {"question": "1+1=", "answer": 2, "tag": "sums", "tools": [{"name": "add"}], "empty": None}
    row = parse_task(value, "rows:1", {"ground_truth": "answer"})
    assert (row.id, row.tag, row.ground_truth) == ("rows:1", "sums", "2")
    assert thaw(row.extra) == {key: item for key, item in value.items() if item is not None}
    assert parse_task({**value, "answer": ["two"]}, "rows:1", {"ground_truth": "answer"}).ground_truth is None
    other = parse_task({**value, "question": "1+2="}, "rows:1", {})
    assert other.prompt != row.prompt  # a row that has changed is found out
    for bad in ([1], "text", {"tag": 3}):
        with pytest.raises(BadRow):
            parse_task(bad, "rows:1", {})
