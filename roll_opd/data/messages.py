"""Parse messages for chat templates. The messages come from files or from clients, in OpenAI's form or a similar form.

Contents become texts, the arguments of tool calls become objects, and roles get the names that templates use.

A row or a turn can have a loss weight; 0 excludes it from the loss. The key of the weight may have the name that
OpenAI, axolotl, ms-swift, verl or slime uses.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

# role -> role in chat templates
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
KNOWN_ROLES = tuple(dict.fromkeys(ROLES.values()))
# other names that are unambiguous: ShareGPT's speakers
_ALIASES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant")}
# role name that only some templates know -> role to write for other templates
_ADVICE = {
    **dict.fromkeys(("observation", "function_response", "ipython", "tool_response", "tool_result"), "tool"),
    **dict.fromkeys(("function_call", "ai", "agent", "answer", "response"), "assistant"),
    **dict.fromkeys(("person", "customer", "question", "instruction"), "user"),
    **dict.fromkeys(("context", "document", "documents"), "system or user"),
}
_TEXT_PARTS = ("text", "input_text", "output_text")
ARGUMENTS = ("arguments", "parameters")  # keys of a tool call: OpenAI's, Llama's
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message that may have the thoughts


class MessageError(ValueError):
    """A message cannot be parsed.

    `field` is the place of the error. `what` is the reason, with a remedy.
    """

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field}: {what}")
        self.field, self.what = field, what


def role_of(written: str) -> str:
    """Return the normalised name of a role. Case is ignored. An unknown role is returned unchanged."""
    folded = written.strip().casefold()
    return ROLES.get(folded) or _ALIASES.get(folded) or written


def role_advice(role: str) -> str:
    """Return the remedy for an unknown role."""
    meant = _ADVICE.get(role.strip().casefold())
    return f"write {meant}" if meant else f"write one of {', '.join(KNOWN_ROLES)}"


def without_nulls(value: Any) -> Any:
    """Return `value` without the nulls that Parquet adds to objects, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def read_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message with a text as `content`, and with objects as the arguments of tool calls.

    Nulls are removed, text parts are joined, and the deprecated `function_call` becomes a tool call. Unknown roles are
    kept. Raises `MessageError`.
    """
    read = without_nulls(message)
    if not isinstance(read.get("role"), str):
        raise MessageError(f"{where}.role", "every message needs a text in 'role'")
    read["role"] = role_of(read["role"])
    calls = _calls(read, where)
    read["content"] = _text(read.get("content"), read, where)
    for name in ("tool_calls", "function_call"):
        read.pop(name, None)
    return {**read, "tool_calls": calls} if calls else read


def read_tools(tools: Any, where: str = "tools") -> list[dict[str, Any]] | None:
    """Return the tools; None if `tools` is neither a list of objects nor the JSON text of such a list.

    Raises `MessageError` if a text starts like a JSON list of objects but is not valid JSON.
    """
    if isinstance(tools, str):
        if not tools.strip():
            return []
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            if not tools.lstrip("[ \t\r\n").startswith("{"):
                return None
            raise MessageError(where, f"is not JSON: {str(error)[:80]}; write a list of objects") from None
    else:
        tools = without_nulls(tools)
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, list | tuple):
        return None
    read = []
    for tool in tools:
        if isinstance(tool, str):  # a tool may be a JSON text, since the schemas of tools differ
            try:
                tool = json.loads(tool)
            except (ValueError, RecursionError):
                return None
        if not isinstance(tool, Mapping) or not tool_name(tool):
            return None
        read.append(dict(tool))
    return read


def tool_name(tool: Mapping[str, Any]) -> str | None:
    """Return the name of a tool or of a tool call. The outer `function` object may be missing."""
    function = tool.get("function")
    name = (function if isinstance(function, Mapping) else tool).get("name")
    return name if isinstance(name, str) and name else None


def _text(content: Any, message: Mapping[str, Any], where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    if content is None and message["role"] == "assistant":
        return ""
    found = "is missing" if content is None else f"is of the type {type(content).__name__}"
    raise MessageError(
        f"{where}.content",
        f"is not a text: it {found}; every message needs a text or a list of text parts in 'content'",
    )


def _part(part: Any, where: str) -> str:
    if isinstance(part, Mapping):
        kind = part.get("type", "text")
        if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            return part["text"]
        if kind not in _TEXT_PARTS:
            raise MessageError(where, f"is a part of type {kind!r}; only text parts are supported; remove this part")
    raise MessageError(where, "is not a text part; write {'type': 'text', 'text': ...} (other parts are not supported)")


def _calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    calls, place = message.get("tool_calls"), f"{where}.tool_calls"
    if isinstance(calls, str):
        calls = _json(calls, place) if calls.strip() else None
    if not calls:
        legacy = message.get("function_call")
        if not legacy or (isinstance(legacy, str) and legacy in ("auto", "none")):
            return []
        calls, place = [legacy], f"{where}.function_call"
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise MessageError(place, "is not a list of objects")
    return [_call(call, f"{place}[{number}]") for number, call in enumerate(calls)]


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object. Chat templates encode the arguments themselves."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        function = {name: call[name] for name in ("name", *ARGUMENTS) if name in call}
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise MessageError(f"{where}.function", "has no name")
    arguments = given_arguments(function)
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where}.function.arguments") if arguments.strip() else {}
        if isinstance(arguments, str):  # encoded twice
            arguments = _json(arguments, f"{where}.function.arguments")
    rest = {name: item for name, item in call.items() if name not in ("name", *ARGUMENTS, "function")}
    own = {name: item for name, item in function.items() if name not in ARGUMENTS}
    return {"type": "function", **rest, "function": {**own, "arguments": {} if arguments is None else arguments}}


def given_arguments(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a tool call as written; None if it has none."""
    return next((call[name] for name in ARGUMENTS if call.get(name) is not None), None)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(where, f"is not JSON: {str(error)[:80]}") from None


# keys of a turn or a row; the value 0 or false excludes it from the loss
MARKS = ("weight", "loss", "loss_mask", "step_loss_mask", "trainable", "train", "training", "loss_weight", "loss_scale")
# keys for weights of spans or tokens, which are not supported
SPANS = ("train_detail", "training_detail", "completion_mask", "assistant_masks")
_WORDS = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}


def loss_mark(marked: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Return (key, is_included): the loss-weight key of a turn or row, and whether the key includes it in the loss.

    Return None if there is no such key. If there are several, a key that excludes the turn or row takes precedence.
    """
    found = [(name, learned) for name in MARKS if (learned := _learned(marked.get(name))) is not None]
    return min(found, key=lambda mark: mark[1], default=None)


def unread_marks(marked: Mapping[str, Any]) -> Iterator[str]:
    """Yield the loss-weight keys with values that are not supported.

    These are weights other than 0 and 1, and weights of spans or tokens.
    """
    for name in MARKS:
        value = marked.get(name)
        number = isinstance(value, int | float | Decimal) and value not in (0, 1)
        if number or (isinstance(value, Sequence) and not isinstance(value, str) and len(value)):
            yield name
    yield from (name for name in SPANS if marked.get(name))


def without_marks(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its loss weights, because no template reads them."""
    return {key: value for key, value in message.items() if key not in MARKS and key not in SPANS}


def _learned(value: Any) -> bool | None:
    if isinstance(value, str):
        return _WORDS.get(value.strip().casefold())
    return bool(value) if isinstance(value, bool | int | float | Decimal) else None
