"""Detect messages, tools, tool calls and thoughts that a chat template drops without an error.

There are two checks:

- A probe is made once for each shape of conversation. It replaces every text, tool and call with a marker, renders the
  conversation, and searches the result for the markers. With markers, a short text that also occurs elsewhere is not
  mistaken for a rendered part.
- The second check searches for the texts themselves in each rendered conversation. It finds omissions that depend on
  the text, such as thoughts that a template removes.

Templates may trim, escape and reorder texts.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_opd.data.messages import KNOWN_ROLES, THOUGHTS, role_advice, tool_name

Messages = list[dict[str, Any]]
Write = Callable[[Messages, list[dict[str, Any]]], str]

THOUGHTS_END = "</think>"
MIN_FOUND = 0.5  # a text counts as rendered in another form if words with this fraction of its letters are found
MAX_SHAPES = 4096  # cached
TEXT_WITH_CALLS = "text next to a tool call"
_SWITCHES = re.compile(r"(\s*/\w+)+\s*")
# forms of a turn with tool calls: empty content as "" or None, arguments as an object or as JSON text
_FORMS = ((False, False), (True, False), (False, True), (True, True))


class TemplateOmission(Exception):
    """Raised if a chat template drops a part of a conversation.

    The message is the rest of a sentence that starts with "the chat template".
    """


@dataclass(frozen=True)
class _Shape:
    """How a template renders one shape of conversation.

    - `form`: the form of tool calls that the template needs.
    - `lost`: the parts that the template drops.
    """

    form: tuple[bool, bool] = _FORMS[0]
    lost: tuple[str, ...] = ()


_SHAPES: dict[tuple, _Shape] = {}


def render_complete(write: Write, source: str, variant: str, messages: Messages, tools: list[dict[str, Any]]) -> str:
    """Render a conversation with the template `source`. Raises `TemplateOmission` if the text lacks a part.

    `write` renders the conversation. The results of probes are cached, and (`source`, `variant`) identifies `write` in
    the cache. Errors that the template raises are not caught.
    """
    shape = _shape(write, (source, variant), messages, tools)
    text = write(_in_form(messages, shape.form), tools)
    lost = [*shape.lost]
    found = _RenderedText(text)
    for message in messages:
        if not message.get("tool_calls") and not found.has(visible(message)):
            lost.append(f"the message of role {message['role']!r}")
        role = message["role"]
        if role not in KNOWN_ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
            raise TemplateOmission(f"does not contain the role {role!r}; {role_advice(role)}")
    if lost:
        raise TemplateOmission(f"leaves out {lost[0]}; use another template, or remove this part from the row")
    return text


def omission(tokenizer: Any, messages: Messages) -> str | None:
    """Return which part the tokenizer's template drops, or None if it drops no part.

    The returned text is the message of `TemplateOmission`. If the template raises an error, the result is None, because
    this error is reported when the conversation is rendered.
    """

    def write(messages: Messages, tools: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    try:
        render_complete(write, str(tokenizer.chat_template), "", messages, [])
    except TemplateOmission as left:
        return str(left)
    except Exception:  # a template may raise anything
        return None
    return None


def omission_of_shape(
    write: Write, source: str, variant: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return which part of a client's conversation a template drops, or None if it drops no part.

    The returned text has the form of a message of `TemplateOmission`. Each shape of conversation is probed once; the
    rendered text is not searched for the texts of the conversation. The result is also None if a content is not text,
    or if the template raises an error.
    """
    contents = [message.get("content") for message in messages]
    if not all(isinstance(content, str | None) for content in contents):
        return None
    given = [{**message, "content": content or ""} for message, content in zip(messages, contents, strict=True)]
    try:
        lost = _shape(write, (source, variant), given, [dict(tool) for tool in tools]).lost
    except Exception:  # a message or tool in another form; the error is reported when the conversation is rendered
        return None
    return f"leaves out {lost[0]}; use another template, or remove this part from the conversation" if lost else None


def check_answer(answer: Mapping[str, Any], text: str) -> None:
    """Raise `TemplateOmission` if the rendered `text` lacks the answer's text, its thoughts or a tool call."""
    found = _RenderedText(text)
    for call in answer.get("tool_calls") or ():
        name = tool_name(call) or ""
        if not found.has(name):
            raise TemplateOmission(f"leaves out the tool call {name!r} of the answer; use a template with tool calls")
    thoughts, rest = _apart(answer["content"])
    if not found.exactly(answer["content"]):
        if not found.has(rest):
            raise TemplateOmission("leaves out the text of the answer; use another template")
        if not _RenderedText(text, without=rest).has(thoughts):
            raise _no_thoughts()
    separate = next((answer[name] for name in THOUGHTS if isinstance(answer.get(name), str)), "")
    if not found.has(separate):
        raise _no_thoughts("write them in `content` for `chatml`")


def drops_text_with_calls(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether `text` lacks the content of a turn with tool calls. Some templates render only the calls."""
    contents = [visible(message) for message in messages if message.get("tool_calls")]
    if not any(map(str.strip, contents)):
        return False
    found = _RenderedText(text)
    return not all(map(found.has, contents))


def visible(message: Mapping[str, Any]) -> str:
    """Return the text of a message that must be in the prompt.

    The text omits parts that templates may drop: thoughts of an assistant turn, and a message that has only switches
    such as `/no_think`.
    """
    if _SWITCHES.fullmatch(message["content"]):
        return ""
    return _apart(message["content"])[1] if message["role"] == "assistant" else message["content"]


def _no_thoughts(how: str = "such as `chatml`") -> TemplateOmission:
    return TemplateOmission(
        "leaves out the thoughts of the answer, so they would not be trained on; use a template that keeps thoughts"
        f" ({how}), or remove the thoughts from the row"
    )


def _apart(content: str) -> tuple[str, str]:
    thoughts, end, rest = content.rpartition(THOUGHTS_END)
    return thoughts.replace("<think>", ""), rest if end else content


class _RenderedText:
    """A rendered text that is searched without regard to case and white space."""

    def __init__(self, text: str, without: str = "") -> None:
        before, _, behind = _squeezed(text).rpartition(_squeezed(without) or "\0")
        self._text = before + behind

    def exactly(self, part: str) -> bool:
        return _squeezed(part) in self._text

    def has(self, part: str) -> bool:
        """Whether the text contains `part` (verbatim or escaped as JSON), or most of the words of `part`."""
        if self.exactly(part):
            return True
        if any(self.exactly(json.dumps(part, ensure_ascii=ascii_)[1:-1]) for ascii_ in (False, True)):
            return True
        words = re.findall(r"\w+", part.casefold())
        matched = sum(len(word) for word in words if word in self._text)
        return matched >= MIN_FOUND * sum(map(len, words))


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()


def _shape(write: Write, key: tuple[str, str], messages: Messages, tools: list[dict[str, Any]]) -> _Shape:
    seen = tuple((m["role"], bool(m["content"].strip()), len(m.get("tool_calls") or ()), *sorted(m)) for m in messages)
    whole = (*key, seen, tuple(tuple(sorted(tool)) for tool in tools))
    if whole not in _SHAPES:
        if len(_SHAPES) >= MAX_SHAPES:
            _SHAPES.clear()
        _SHAPES[whole] = _probed(write, messages, tools)
    return _SHAPES[whole]


def _probed(write: Write, messages: Messages, tools: list[dict[str, Any]]) -> _Shape:
    """Probe a template with each form of tool calls. Returns the shape with the fewest dropped parts.

    If several forms drop equally few parts, the first one is returned.
    """
    marked, marked_tools, marks = _marked(messages, tools)
    has_calls = any(message.get("tool_calls") for message in messages)
    tried = []
    for form in _FORMS if has_calls else _FORMS[:1]:
        try:
            text = write(_in_form(marked, form), marked_tools).casefold()
        except Exception:  # a template may raise any error; the conversation itself is rendered afterwards
            continue
        tried.append(_Shape(form, tuple(what for mark, what in marks.items() if mark not in text)))
    return min(tried, key=lambda shape: len(shape.lost), default=_Shape())


def _marked(messages: Messages, tools: list[dict[str, Any]]) -> tuple[Messages, list[dict[str, Any]], dict[str, str]]:
    """Return (conversation, tools, marks), with a marker in place of each text, tool and call.

    `marks` maps each marker to the name of the part that it replaces.
    """
    marks: dict[str, str] = {}

    def mark(what: str) -> str:
        text = f"zq{len(marks)}qz"
        marks[text] = what
        return text

    written = []
    for message in messages:
        calls = [
            _named(call, mark(f"the tool call {tool_name(call)!r}"), {"a": mark("the arguments of a tool call")})
            for call in message.get("tool_calls") or ()
        ]
        content = message["content"]
        if content.strip():  # no marker in a turn with tool calls, whose content may be dropped
            content = "text" if calls else mark(f"the message of role {message['role']!r}")
        written.append({**message, "content": content, **({"tool_calls": calls} if calls else {})})
    named = [_named(tool, mark(f"the tool {tool_name(tool)!r}")) for tool in tools]
    return written, named, marks


def _named(tool: dict[str, Any], name: str, arguments: Any = None) -> dict[str, Any]:
    new = {"name": name, **({} if arguments is None else {"arguments": arguments})}
    return {**tool, "function": {**tool["function"], **new}} if "function" in tool else {**tool, **new}


def _in_form(messages: Messages, form: tuple[bool, bool]) -> Messages:
    as_none, as_json = form
    if not (as_none or as_json):
        return messages
    return [_message_in_form(message, as_none, as_json) for message in messages]


def _message_in_form(message: dict[str, Any], as_none: bool, as_json: bool) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = None if as_none and not message["content"].strip() else message["content"]
    if as_json:
        calls = [_named(call, call["function"]["name"], json.dumps(call["function"]["arguments"])) for call in calls]
    return {**message, "content": content, "tool_calls": calls}
