"""vLLM's parsers of tool calls."""

import json
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from roll_opd.inference.tool_calls import find_parser, read_hermes

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "examples" / "demo" / "models" / "student")
TOKENIZER_OF_CALLS = AutoTokenizer.from_pretrained(
    Path(__file__).parents[2] / "examples" / "demo" / "models" / "student",
    additional_special_tokens=["<tool_call>", "</tool_call>"],
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def test_a_parser_of_vllm_reads_its_models_way_to_call() -> None:
    read = find_parser("pythonic", TOKENIZER)
    content, (call,) = read("[add(a=1, b='x')]", TOOLS)
    assert content == "" and call.name == "add" and json.loads(call.arguments) == {"a": 1, "b": "x"}
    assert read("no call", TOOLS) == ("no call", [])
    with pytest.raises(ValueError, match=r"tool_call_parser: pythonik is unknown; known are .*pythonic"):
        find_parser("pythonik", TOKENIZER)


@pytest.mark.parametrize(
    "text",
    [
        'so <tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{"name": "b", "arguments": {}}</tool_call>',
        "nothing to call",
    ],
)  # fmt: skip
def test_ours_reads_what_vllms_of_the_same_format_does(text: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="", messages=[], tools=TOOLS)
    found = ToolParserManager.get_tool_parser("hermes")(TOKENIZER, request.tools).extract_tool_calls(text, request)
    content, calls = read_hermes(text, TOOLS)
    assert content == (found.content or "").rstrip() and len(calls) == len(found.tool_calls)
    for ours, theirs in zip(calls, found.tool_calls, strict=True):
        assert ours.name == theirs.function.name
        assert json.loads(ours.arguments) == json.loads(theirs.function.arguments)


CODER = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
THOUGHTS = (
    ("[add(a=9)] perhaps", "pythonic", "[add(a=1)]"),
    ("the form is <tool_call>, so " + CODER.format(9), "qwen3_coder", CODER.format(1)),
)


@pytest.mark.parametrize(("thought", "name", "call"), THOUGHTS, ids=[name for _, name, _ in THOUGHTS])
def test_a_thought_holds_no_call_of_any_parser(thought: str, name: str, call: str) -> None:
    read = find_parser(name, TOKENIZER_OF_CALLS)
    for opening in ("<think>", ""):
        thoughts = f"{opening}{thought}</think>"
        for separator in ("", "\n\n"):
            content, calls = read(thoughts + separator + call, TOOLS)
            assert content.rstrip() == thoughts
            assert [json.loads(found.arguments)["a"] in (1, "1") for found in calls] == [True]
        assert read(f"{thoughts}3", TOOLS) == (f"{thoughts}3", [])
    assert read(f"<think>{thought}", TOOLS) == (f"<think>{thought}", [])


def test_a_malformed_call_loses_no_other() -> None:
    read = find_parser("qwen3_coder", TOKENIZER_OF_CALLS)
    for bad in ("<tool_call>\n{not one}\n</tool_call>", "<tool_call>\n<function=add\n</tool_call>"):
        for text in (bad + CODER.format(1), CODER.format(1) + bad):
            assert [json.loads(call.arguments)["a"] for call in read(text, TOOLS)[1] if "a" in call.arguments], text


def call_of(text: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "add", "arguments": {"a": text}}) + "\n</tool_call>"


@pytest.mark.parametrize(
    "argument", ["use <think> tags", "x </think> y", "<think>no</think>", "<tool_call>", "[THINK]"]
)
@pytest.mark.parametrize("before", ["", "<think>so</think>", "so</think>", f"<think>{call_of('no')}</think>"])
def test_marks_in_the_arguments_of_a_call_are_text(before: str, argument: str) -> None:
    for read in (lambda text: read_hermes(text, TOOLS), lambda text: read_hermes(text + call_of("b"), TOOLS)):
        content, calls = read(before + call_of(argument))
        assert content == before
        assert json.loads(calls[0].arguments) == {"a": argument}
    assert read_hermes(f"<think>{call_of(argument)}", TOOLS)[1] == []


@pytest.mark.parametrize(
    "piece", ["<tool_call>", "</tool_call>", "</think>", "<think>x</think>", "<tool_call></tool_call>"]
)
def test_a_response_that_repeats_itself_takes_linear_time(piece: str) -> None:
    began = time.process_time()
    text = piece * 30_000
    assert read_hermes(text, TOOLS) == (text, [])
    assert time.process_time() - began < 3
