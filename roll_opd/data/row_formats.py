"""Parse prompt rows, in ROLL's format and other common formats, into `Row`.

An unusable row raises `BadRow`, whose `kind` is the category of the problem.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Number
from typing import Any

from roll_opd.base.frozen import FrozenDict, freeze
from roll_opd.data.messages import THOUGHTS, MessageError, read_message, read_tools

DEFAULT_TAG = "math_rule"  # tag of rows without one, as in ROLL

# kinds of bad rows
NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"
NO_PROMPT = "without a prompt"
EMPTY = "empty messages or prompt"
WRONG_TYPE = "a field of the wrong type"
PLAIN_PROMPT = "plain text, which cannot have the system_prompt"
NOT_TEXT = "with images, videos or sounds"

_KNOWN_KEYS = frozenset({"id", "tag", "messages", "conversations", "prompt", "ground_truth"})
# speakers of ShareGPT's form -> roles
_SPEAKERS = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}

MEDIA = ("images", "videos", "audios")  # columns of multimodal prompts
# columns of a prompt in addition to the text
PROMPT_COLUMNS = (*MEDIA, "tools", "functions", "chat_template_kwargs")
RESERVED_VARIABLES = frozenset(
    {"messages", "conversation", "chat_template", "tools", "documents", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs"}
)
_MISSING = ("NaTType", "NAType")  # pandas' classes

_NO_RENAMES: Mapping[str, str] = FrozenDict()


class DataError(ValueError):
    """Raised if data cannot be used. The message names the place in the data and a remedy."""


class BadRow(Exception):
    """Raised if a row cannot be used. `kind` is a category, such as the constants above, and `detail` is the reason."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


@dataclass(frozen=True)
class Row:
    """A usable row.

    The prompt is either the conversation in `messages` or the plain text in `prompt`. A plain text is tokenised
    unchanged.
    """

    id: str
    tag: str
    messages: tuple[FrozenDict, ...] = ()  # {"role": str, "content": str, ...}
    prompt: str | None = None
    ground_truth: str | None = None
    answers: tuple[FrozenDict, ...] = ()  # answers as messages: one in schema sft, chosen and rejected in schema dpo
    extra: FrozenDict = field(default_factory=FrozenDict)  # all other keys, such as test_cases
    tools: tuple[FrozenDict, ...] = ()  # tools for the chat template
    # variables for the chat template (`chat_template_kwargs`)
    variables: FrozenDict = field(default_factory=FrozenDict)
    unread: tuple[str, ...] = ()  # non-empty columns and keys that are ignored, for warnings


def parse_row(
    value: Any, fallback_id: str, columns: Mapping[str, str] = _NO_RENAMES, *, has_answers: bool = False
) -> Row:
    """Parse a decoded value, such as a JSON object, into a row. Raises `BadRow` if the row cannot be used.

    The prompt is in the first of these columns that has a value:

    - `messages`: a list of `{"role", "content"}`, or the JSON string of such a list.
    - `prompt`: a plain text, or a list as in `messages`.
    - `conversations`: a list in ShareGPT's format.

    Assistant turns at the end of the conversation are the answer, so they are removed unless `has_answers` is set. A
    row without a tag gets `DEFAULT_TAG`, and a row without an id gets `fallback_id`.

    `columns` maps the names messages, prompt, tag, id and ground_truth to the column names of the data set.
    """
    value = rename_columns(value, columns)
    messages, prompt = _parse_prompt(value, columns)
    if messages and not has_answers:
        messages = _question(messages)
    media = next((name for name in MEDIA if _holds(value.get(name))), None)
    if media:
        raise BadRow(NOT_TEXT, f"{media} is not empty; only text models are supported, remove the row or the column")
    tools, unread = _tools(value)
    ignores_system = _is_written(value.get("system")) and not (messages and messages[0]["role"] == "system")
    return Row(
        id=_text(value, "id") or fallback_id,
        tag=tag_of(value.get("tag")),
        messages=messages,
        prompt=prompt,
        ground_truth=_text(value, "ground_truth"),
        tools=tools,
        variables=_variables(value.get("chat_template_kwargs")),
        unread=(*unread, *(["system"] if ignores_system else [])),
        extra=FrozenDict({key: item for key, item in value.items() if key not in _KNOWN_KEYS}),
    )


def parse_task(value: Any, fallback_id: str, columns: Mapping[str, str]) -> Row:
    """Parse a decoded value into a row for a workflow. Raises `BadRow` if the row cannot be used.

    All columns that are not null are kept in `extra`. The prompt is the JSON text of the row. This text is only hashed
    to detect changes; no model reads it. `columns` maps the names tag, id and ground_truth to the column names of the
    data set.
    """
    raw, own = rename_columns(value, _NO_RENAMES), rename_columns(value, columns)
    truth = own.get("ground_truth")
    return Row(
        id=_text(own, "id") or fallback_id,
        tag=tag_of(own.get("tag")),
        prompt=encodable(json.dumps(raw, ensure_ascii=False, default=str), "the row"),
        ground_truth=_text(own, "ground_truth") if isinstance(truth, str | Number) else None,
        extra=FrozenDict(raw),
    )


def with_system_prompt(row: Row, text: str | None) -> Row:
    """Return the row with `text` as its system message, unless the conversation has one. Raises `BadRow`."""
    if text is None or (row.messages and row.messages[0]["role"] == "system"):
        return row
    if row.prompt is not None:
        raise BadRow(PLAIN_PROMPT, "write the prompts as messages, or remove system_prompt")
    return replace(row, messages=(FrozenDict({"role": "system", "content": text}), *row.messages))


def rename_columns(value: Any, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the row as a dict, without nulls and with renamed columns. Raises `BadRow` if the row is not an object.

    `columns` maps each new name to the column name of the data set.
    """
    if isinstance(value, BadRow):
        raise value
    if not isinstance(value, dict):
        raise BadRow(NOT_AN_OBJECT, type(value).__name__)
    # in Parquet, every row has every column, and a missing value is None
    value = {key: item for key, item in value.items() if not is_null(item)}
    if columns:
        found = {key: value[name] for key, name in columns.items() if name in value}
        value = {**{key: item for key, item in value.items() if key not in columns}, **found}
    return value


def is_null(value: Any) -> bool:
    """Whether a value is None, NaN, or pandas' NaT or NA."""
    if value is None or type(value).__name__ in _MISSING:
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, Number) and value != value  # also NaN of NumPy's types


def is_missing(value: Any) -> bool:
    """Whether a value counts as missing: a null, an infinite number, or an empty or blank text."""
    if isinstance(value, str):
        return not value.strip()
    return is_null(value) or (isinstance(value, float | Decimal) and not math.isfinite(value))


def number_text(number: Any) -> str:
    """Return the digits of a number. A whole number has one spelling: 42.0, Decimal("42.00") and 4.2e1 become "42".

    A column of whole numbers in which one value is missing has floats in pandas and in Parquet.
    """
    if isinstance(number, int):
        return str(number)
    exact = Decimal(str(number))
    is_whole = exact.is_finite() and exact == exact.to_integral_value()
    return str(int(exact)) if is_whole else format(exact, "f")


def tag_of(value: Any) -> str:
    """Return a row's tag, or `DEFAULT_TAG` if the tag is missing. Raises `BadRow` if the tag is not a text."""
    if is_missing(value):
        return DEFAULT_TAG
    if not isinstance(value, str):
        raise BadRow(WRONG_TYPE, f"tag must be a text, not {type(value).__name__}")
    return encodable(value, "tag")


def without_prompt(names: Sequence[str], columns: Mapping[str, str]) -> BadRow:
    """Return the `BadRow` for a row that has none of the columns `names`.

    The error message lists these columns under their names in the file.
    """
    looked_for = filter(None, (columns.get(name, name) for name in names))
    return BadRow(NO_PROMPT, f"none of the columns {', '.join(looked_for)}; name the column in data_args")


def _parse_prompt(value: dict[str, Any], columns: Mapping[str, str]) -> tuple[tuple[FrozenDict, ...], str | None]:
    names = ("messages", "prompt", "conversations")
    column = first_present(value, names)
    if column is None:
        raise without_prompt(names, columns)
    if column == "conversations":
        return parse_shared_gpt(value), None
    prompt = value[column]
    if column != "prompt" or isinstance(prompt, list):
        return parse_messages(prompt), None
    if not isinstance(prompt, str):
        raise BadRow(WRONG_TYPE, f"prompt must be a text or a list of messages, not {type(prompt).__name__}")
    if not prompt.strip():
        raise BadRow(EMPTY)
    return (), encodable(prompt, "prompt")


def first_present(value: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of `names` that has a value in the row.

    If none of the names has a value, return the first name that exists in the row, or None if no name exists.
    """
    present = [name for name in names if name in value]
    return next((name for name in present if not is_missing(value[name])), present[0] if present else None)


def _tools(value: Mapping[str, Any]) -> tuple[tuple[FrozenDict, ...], tuple[str, ...]]:
    """Return (tools, unread) of a row. Raises `BadRow` if the tools cannot be parsed.

    If the format of the tools column is not supported, `tools` is empty and `unread` has the name of the column.
    """
    for name in ("tools", "functions"):
        written = value.get(name)
        if not written or is_missing(written):
            continue
        try:
            tools = read_tools(written, name)
        except (MessageError, RecursionError) as error:
            raise BadRow(WRONG_TYPE, str(error) or f"{name} is nested too deeply") from None
        if tools is None:
            return (), (name,)
        if tools and name == "functions":
            tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
        if tools:
            return freeze(tools), ()
    return (), ()


def _variables(value: Any) -> FrozenDict:
    """Return the template variables of column `chat_template_kwargs`.

    The column has an object or its JSON text. Raises `BadRow` for other content, and for variables with reserved names.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow(NOT_JSON, f"chat_template_kwargs: {str(error)[:80]}") from None
    if not value or is_missing(value):
        return FrozenDict()
    if not isinstance(value, dict) or not value.keys().isdisjoint(RESERVED_VARIABLES):
        raise BadRow(WRONG_TYPE, "chat_template_kwargs must be an object with variables of the chat template")
    return FrozenDict({key: item for key, item in value.items() if item is not None})


def _holds(value: Any) -> bool:
    """Whether a column for images, videos or sounds has content."""
    if isinstance(value, list | tuple | Mapping):
        return any(map(_holds, value.values() if isinstance(value, Mapping) else value))
    return not is_missing(value) and value not in ("[]", "{}", False)


def _is_written(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _question(messages: tuple[FrozenDict, ...]) -> tuple[FrozenDict, ...]:
    """Return a conversation without the assistant turns at its end. Raises `BadRow` if no text is left."""
    question = list(messages)
    while question and question[-1]["role"] == "assistant":
        question.pop()
    if not any(message["content"].strip() for message in question):
        raise BadRow(EMPTY, "no text before the assistant's turn")
    return tuple(question)


def parse_messages(messages: Any) -> tuple[FrozenDict, ...]:
    """Parse a conversation in OpenAI's or ShareGPT's format. Raises `BadRow` if it cannot be used.

    The conversation is a list or the JSON string of a list. A tuple is the result of an earlier call, and is returned
    unchanged.
    """
    if isinstance(messages, tuple) and messages:
        return messages
    if isinstance(messages, tuple):
        raise BadRow(EMPTY)
    if isinstance(messages, str):
        if not messages.strip():
            raise BadRow(EMPTY)
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise BadRow(NOT_JSON, f"messages: {str(error)[:80]}") from None
    if not isinstance(messages, list):
        raise BadRow(WRONG_TYPE, f"messages must be a list, not {type(messages).__name__}")
    read = [_parse_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    if not any(message["content"].strip() or message.get("tool_calls") for message in read):
        raise BadRow(EMPTY)
    return freeze(read)


def _parse_message(message: Any, where: str) -> dict[str, Any]:
    try:
        message = _with_role(message)
        read = read_message(message, where)
    except MessageError as error:
        raise BadRow(WRONG_TYPE, str(error)) from None
    except RecursionError:
        raise BadRow(WRONG_TYPE, f"{where} is nested too deeply") from None
    if message.get("content") is None and not any(read.get(name) for name in ("tool_calls", *THOUGHTS)):
        raise BadRow(WRONG_TYPE, f"{where}: every message needs a text in 'content', or 'tool_calls'")
    encodable(read["role"], "role")
    encodable(read["content"], "content")
    return read


def parse_shared_gpt(value: dict[str, Any]) -> tuple[FrozenDict, ...]:
    """Return the conversation in column `conversations`, in ShareGPT's format. Raises `BadRow` if it cannot be used.

    The text in column `system` becomes the system message, unless the conversation already has one.
    """
    messages, system = parse_messages(value["conversations"]), value.get("system")
    if not isinstance(system, str) or not system.strip() or messages[0]["role"] == "system":
        return messages
    return (*parse_messages([{"role": "system", "content": system}]), *messages)


def _with_role(message: Any) -> dict[str, Any]:
    """Return a message as `{"role", "content"}`. A message in ShareGPT's form `{"from", "value"}` is converted."""
    if not isinstance(message, dict):
        raise BadRow(WRONG_TYPE, f"a message must be an object, not {type(message).__name__}")
    if message.get("role") is not None or message.get("from") is None:
        return message
    speaker = message["from"]
    known = speaker.strip().casefold() if isinstance(speaker, str) else None
    if known not in _SPEAKERS:
        raise BadRow(WRONG_TYPE, f"unknown speaker {speaker!r}; known are {', '.join(_SPEAKERS)}")
    rest = {key: item for key, item in message.items() if key not in ("from", "value", "role", "content")}
    return {"role": _SPEAKERS[known], "content": message.get("value"), **rest}


def encodable(text: str, name: str) -> str:
    """Return `text`. Raises `BadRow` if the text cannot be encoded as UTF-8, because every tokenizer needs UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow(WRONG_TYPE, f"{name} has half of a surrogate pair, which no tokenizer accepts") from None
    return text


def _text(value: dict[str, Any], key: str) -> str | None:
    """Return a text field, or None if the field is missing.

    A number is converted to text, because in many files ids and answers are numbers.
    """
    item = value.get(key)
    if is_missing(item):
        return None
    if isinstance(item, str):
        return encodable(item, key)
    if isinstance(item, Number) and not isinstance(item, bool | complex):
        return number_text(item)
    raise BadRow(WRONG_TYPE, f"{key} must be a text or a number, not {type(item).__name__}")
