"""Finds the calls of tools in what a model wrote."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HERMES = "hermes"  # of Qwen and many others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>
_HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """The name of a tool, and its arguments as JSON."""

    name: str
    arguments: str


# what a model wrote and the tools that it had -> the text beside the calls, and the calls
ToolCallParser = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[ToolCall]]]


def find_parser(name: str, tokenizer: Any) -> ToolCallParser:
    """Return the parser of a model's way to call tools: `hermes`, or another name that vLLM's --tool-call-parser knows.

    ValueError for a name that vLLM does not know either; to ask vLLM takes some seconds, and half a gigabyte.
    """
    return read_hermes if name == HERMES else _of_vllm(name, tokenizer)


def read_hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Return what stands before the first call, and the calls; the whole text and none where one cannot be read."""
    calls = []
    for written in _HERMES_CALL.findall(text):
        try:
            call = json.loads(written)
            calls.append(ToolCall(call["name"], json.dumps(call.get("arguments", {}), ensure_ascii=False)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return text, []
        if not isinstance(call["name"], str):
            return text, []
    return (text[: text.index("<tool_call>")].rstrip(), calls) if calls else (text, [])


def _of_vllm(name: str, tokenizer: Any) -> ToolCallParser:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted({HERMES, *ToolParserManager.list_registered()}))
        raise ValueError(f"tool_call_parser: {name} is unknown; known are {known}") from None

    def read(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
        request = ChatCompletionRequest(model="", messages=[], tools=[dict(tool) for tool in tools])
        found = parser(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [ToolCall(call.function.name, call.function.arguments) for call in found.tool_calls]
        return (found.content or "", calls) if found.tools_called else (text, [])

    return read
