"""Parse the tool calls in a response. Thoughts are skipped, and a malformed call does not affect other calls."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_opd.base.thoughts import thought_spans
from roll_opd.data.messages import given_arguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HERMES = "hermes"  # format of Qwen and many other models: <tool_call>{"name": ..., "arguments": {...}}</tool_call>


@dataclass(frozen=True)
class ToolCall:
    """Name of a tool, and its arguments as JSON."""

    name: str
    arguments: str


# (response, available tools) -> text before the first call, thoughts included, and the calls
ToolCallParser = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[ToolCall]]]


def find_parser(name: str, tokenizer: Any) -> ToolCallParser:
    """Return the tool-call parser with this name. Raises ValueError for an unknown name.

    The name is `hermes`, or a name that vLLM's --tool-call-parser accepts. Names other than `hermes` import vLLM, which
    takes seconds and half a gigabyte of memory.
    """
    return read_hermes if name == HERMES else _vllm_parser(name, tokenizer)


def read_hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Return (text, calls): the text before the first call, and the calls.

    If there is no call, the text is the complete response, and the list of calls is empty.
    """
    calls, first = [], len(text)
    for start, written in _blocks(_without_thoughts(text)):
        if call := _call(written):
            calls.append(call)
            first = min(first, start)
    return (text[:first].rstrip(), calls) if calls else (text, [])


def _call(written: str) -> ToolCall | None:
    """Return the call that a block contains, or None if the call is malformed."""
    try:
        call = json.loads(written)
        if isinstance(call["name"], str):
            return ToolCall(call["name"], _as_json(given_arguments(call)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return None


def _as_json(arguments: Any) -> str:
    """Return the arguments of a call as JSON. A call without arguments has an empty object, as in OpenAI's API."""
    if isinstance(arguments, str):  # already encoded, or a single text
        try:
            return _as_json(json.loads(arguments)) if arguments.strip() else "{}"
        except ValueError:
            pass
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield (start, content) for each tool-call block. The search takes linear time.

    A block ends at a closing mark, and can have several opening marks. If a complete call follows the first opening
    mark, the block starts there. Otherwise it starts at the last opening mark.
    """
    end = 0
    while (close := text.find(CLOSE, end)) >= 0:
        first, last = text.find(OPEN, end, close), text.rfind(OPEN, end, close)
        if first >= 0:
            start = first if first == last or _call(text[first + len(OPEN) : close]) else last
            yield start, text[start + len(OPEN) : close]
        end = close + len(CLOSE)


def _thoughts(text: str) -> list[tuple[int, int]]:
    """Return (start, end) for each thought.

    Thought marks inside the arguments of a complete call are ordinary text.
    """
    return list(
        thought_spans(_blanked(text, ((at, at + len(OPEN + call)) for at, call in _blocks(text) if _call(call))))
    )


def _without_thoughts(text: str) -> str:
    return _blanked(text, _thoughts(text))


def _blanked(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Return the text with each of the ascending `spans` replaced by blanks. Offsets in the text do not change."""
    parts, done = [], 0
    for start, end in spans:
        parts += [text[done:start], " " * (end - start)]
        done = end
    return "".join([*parts, text[done:]])


def _vllm_parser(name: str, tokenizer: Any) -> ToolCallParser:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted({HERMES, *ToolParserManager.list_registered()}))
        raise ValueError(f"tool_call_parser: {name} is unknown; known are {known}") from None

    def extracted(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
        request = ChatCompletionRequest(model="", messages=[], tools=[dict(tool) for tool in tools])
        reader = parser(tokenizer, request.tools)
        try:
            found = reader.extract_tool_calls(text, request)
        except Exception:  # parsers may fail on malformed output of a model
            return text, []
        written = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        calls = [ToolCall(name, "{}" if given.strip() in ("", "null") else given) for name, given in written]
        return (found.content or "", calls) if found.tools_called else (text, [])

    def read(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
        begin = next((end for start, end in _thoughts(text) if not text[:start].strip()), 0)
        begin += len(text[begin:]) - len(text[begin:].lstrip()) if begin else 0
        answer = _without_thoughts(text)
        content, calls = extracted(answer[begin:], tools)
        if not calls:  # a malformed call may have hidden the others
            blocks = [(start, extracted(f"{OPEN}{inside}{CLOSE}", tools)[1]) for start, inside in _blocks(answer)]
            calls = [call for _, found in blocks for call in found]
            content = text[begin : next((start for start, found in blocks if found), begin)].rstrip()
        return (text[:begin] + content, calls) if calls else (text, [])

    return read
