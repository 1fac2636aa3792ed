"""Messages in files: every form of OpenAI's format and similar formats is read, or refused with place and reason."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roll_opd.base.frozen import thaw
from roll_opd.data.messages import MessageError, read_message, read_tools
from roll_opd.data.row_files import open_file
from roll_opd.data.row_formats import NOT_TEXT, WRONG_TYPE, BadRow, parse_messages, parse_row
from roll_opd.workflows.endpoint.chat import Refusal, read_request

ASK = {"role": "user", "content": "1+2="}
FUNCTION = {"name": "add", "arguments": {"a": 1, "b": [2]}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "c1", "function": FUNCTION}]}
NO_ID = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": FUNCTION}]}
TEXT = json.dumps(FUNCTION["arguments"])
IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}


def called(function: Any, **message: Any) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}], **message}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (called(FUNCTION), CALL),
        (called({**FUNCTION, "arguments": TEXT}), CALL),
        (called({**FUNCTION, "arguments": json.dumps(TEXT)}), CALL),
        (called(FUNCTION, function_call=None, name=None), CALL),
        ({"role": "Assistant", "tool_calls": [{"id": "c1", **FUNCTION}]}, CALL),
        ({"role": "gpt", "content": "", "tool_calls": json.dumps(CALL["tool_calls"])}, CALL),
        ({"role": "assistant", "content": None, "function_call": {**FUNCTION, "arguments": TEXT}}, NO_ID),
        ({**ASK, "tool_calls": [], "function_call": {"name": None}, "content": ASK["content"]}, ASK),
        ({"role": "human", "content": [{"type": "text", "text": "1+", "image_url": None}, {"text": "2="}]}, ASK),
        ({"role": " USER", "content": [{"type": "input_text", "text": "1+2="}]}, ASK),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "function", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "3"}),
    ],
)
def test_every_form_is_one_message(message: dict, expected: dict) -> None:
    """Both in a row and at the endpoint."""
    assert thaw(parse_messages([ASK, message])[1]) == expected
    body = json.dumps({"messages": [ASK, message]}).encode()
    assert read_request(body).messages == [ASK, expected]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            called({**FUNCTION, "arguments": "{'a': 1}"}),
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments: is not JSON",
        ),
        (called({"arguments": TEXT}), r"tool_calls\[0\]\.function: has no name"),
        ({"role": "assistant", "tool_calls": "[{"}, r"tool_calls: is not JSON"),
        (
            {"role": "user", "content": [IMAGE, {"type": "text", "text": "?"}]},
            r"content\[0\]: is a part of type 'image_url'",
        ),
        ({"role": "user", "content": [{"type": "input_audio", "text": None}]}, "part of type 'input_audio'"),
        ({"role": "user", "content": {"text": "x"}}, r"messages\[1\]\.content: .* of the type dict"),
        ({"role": "tool", "content": None}, r"messages\[1\]\.content: .*is missing"),
    ],
)
def test_errors_of_messages_have_place_and_reason(message: dict, said: str) -> None:
    with pytest.raises(BadRow, match=said) as found:
        parse_messages([ASK, message])
    assert found.value.kind == WRONG_TYPE
    with pytest.raises(Refusal, match=said):
        read_request(json.dumps({"messages": [ASK, message]}).encode())


def test_an_empty_assistant_message_is_bad_in_a_file() -> None:
    with pytest.raises(BadRow, match="text in 'content', or 'tool_calls'"):
        parse_messages([ASK, {"role": "assistant", "content": None}])
    assert parse_messages([ASK, {"role": "assistant", "content": None, "reasoning_content": "so"}])


def test_parquet_gives_the_calls_and_tools_of_the_same_json(tmp_path: Path) -> None:
    """Arrow merges all arguments and schemas into one struct, and fills missing keys of a row with nulls."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {key: kind}}}}
        for name, key, kind in (("add", "a", {"type": "integer"}), ("say", "text", {"type": "string", "enum": ["x"]}))
    ]
    calls = [called({"name": "add", "arguments": {"a": 1}}), called({"name": "say", "arguments": {"text": "x"}})]
    rows = [{"messages": [ASK, call, {"role": "tool", "content": "3"}], "tools": tools} for call in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for written, (_, _, value) in zip(rows, open_file(str(tmp_path / "rows.parquet")).scan(), strict=True):
        assert value != written
        assert parse_row(value, "0").messages == parse_row(written, "0").messages
        assert parse_row(value, "0").tools == parse_row(written, "0").tools


def test_an_explicit_null_in_arguments_stays(tmp_path: Path) -> None:
    (read,) = read_message(called({"name": "add", "arguments": '{"a": null}'}), "m")["tool_calls"]
    assert read["function"]["arguments"] == {"a": None}


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        ([{"name": "add"}], ["add"]),
        ('[{"function": {"name": "add"}}]', ["add"]),
        (['{"function": {"name": "add"}}'], ["add"]),
        ({"name": "add"}, ["add"]),
        ([], []),
        ("", []),
        ("[]", []),
        (["python"], None),
        ("python", None),
        ("[python, search]", None),
        ([{"type": "web_search"}], None),
        (3, None),
    ],
)
def test_tools_are_objects_with_names(tools: Any, names: list | None) -> None:
    found = read_tools(tools)
    assert found is None if names is None else [tool.get("function", tool)["name"] for tool in found or []] == names
    row = parse_row({"prompt": [ASK], "tools": tools}, "0")
    assert (len(row.tools), row.unread) == (len(names or ()), ("tools",) if names is None else ())
    with pytest.raises(MessageError, match="tools: is not JSON"):
        read_tools('[{"name": ')


@pytest.mark.parametrize("name", ["images", "videos", "audios"])
def test_rows_with_media_are_bad(name: str) -> None:
    for empty in ([], None, "", [None], float("nan"), [{"bytes": None, "path": None}]):
        assert parse_row({"prompt": [ASK], name: empty}, "0").unread == ()
    for full in (["x.png"], [{"bytes": b"x"}], "x.png"):
        with pytest.raises(BadRow, match=name) as found:
            parse_row({"prompt": [ASK], name: full}, "0")
        assert found.value.kind == NOT_TEXT


def test_an_ignored_system_column_is_warned_of() -> None:
    assert parse_row({"messages": [ASK], "system": "Be brief."}, "0").unread == ("system",)
    system = {"role": "system", "content": "Be brief."}
    assert parse_row({"messages": [system, ASK], "system": "Be brief."}, "0").unread == ()
