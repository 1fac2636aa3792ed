"""Prompt rows as a user brings them, ROLL's and the field's forms: what a row may hold, and what makes one unusable."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_opd.frozen import FrozenDict, freeze

DEFAULT_TAG = "math_rule"  # of a row without a tag, as in ROLL

# kinds of bad rows
NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"
NO_PROMPT = "without a prompt"
EMPTY = "empty messages or prompt"
WRONG_TYPE = "a field of the wrong type"

_KNOWN_KEYS = frozenset({"id", "tag", "messages", "conversations", "prompt", "ground_truth"})
# speakers of ShareGPT's form -> roles
_SPEAKERS = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}

_OWN_NAMES: Mapping[str, str] = FrozenDict()


class DataError(ValueError):
    """The data a user gave cannot be used; the message says where and what to do."""


class BadRow(Exception):
    """A row that cannot be used, of one of the kinds above; `detail` says what is wrong with it."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Row:
    """One usable row: a conversation in `messages`, or a text in `prompt` that the model gets as it is."""

    id: str
    tag: str
    messages: tuple[FrozenDict, ...] = ()  # {"role": str, "content": str, ...}
    prompt: str | None = None
    ground_truth: str | None = None
    answers: tuple[FrozenDict, ...] = ()  # messages that may follow: one in schema sft; chosen and rejected in dpo
    extra: FrozenDict = field(default_factory=FrozenDict)  # every other key, such as test_cases
    unread: tuple[str, ...] = ()  # columns that may belong to the question and are left out, for no key names them


def parse_row(
    value: Any, fallback_id: str, columns: Mapping[str, str] = _OWN_NAMES, *, has_answers: bool = False
) -> Row:
    """Return the row in a decoded value; raises `BadRow`.

    `columns` maps messages, prompt, tag and id to their names in the value, where they differ.
    `messages` is a list, or a JSON string of one, of `{"role", "content"}`; without it `prompt` is a text or such a
    list, and without that `conversations` is one, as in ShareGPT. The assistant's last turn is left out, since it is an
    answer, unless the row `has_answers` of its own. A missing tag becomes `DEFAULT_TAG`, a missing id `fallback_id`.
    """
    value = own_names(value, columns)
    messages, prompt = _parse_prompt(value, columns)
    if messages and not has_answers:
        messages = _question(messages)
    tag = value.get("tag", DEFAULT_TAG)
    if not isinstance(tag, str) or not tag:
        raise BadRow(WRONG_TYPE, "tag must be a text that is not empty")
    return Row(
        id=_text(value, "id") or fallback_id,
        tag=encodable(tag, "tag"),
        messages=messages,
        prompt=prompt,
        ground_truth=_text(value, "ground_truth"),
        extra=FrozenDict({key: item for key, item in value.items() if key not in _KNOWN_KEYS}),
    )


def parse_task(value: Any, fallback_id: str, columns: Mapping[str, str]) -> Row:
    """Return a row that a workflow reads: `extra` is all of it as it was written; raises `BadRow`.

    `columns` maps tag, id and ground_truth to their names in the value. The prompt is the row as text: it says whether
    the row has changed, and no model reads it.
    """
    raw, own = own_names(value, _OWN_NAMES), own_names(value, columns)
    tag, truth = own.get("tag", DEFAULT_TAG), own.get("ground_truth")
    if not isinstance(tag, str) or not tag:
        raise BadRow(WRONG_TYPE, "tag must be a text that is not empty")
    return Row(
        id=_text(own, "id") or fallback_id,
        tag=encodable(tag, "tag"),
        prompt=encodable(json.dumps(raw, ensure_ascii=False, default=str), "the row"),
        ground_truth=_text(own, "ground_truth") if isinstance(truth, str | int | float) else None,
        extra=FrozenDict(raw),
    )


def own_names(value: Any, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that are not None, renamed by `columns`; raises `BadRow` for what is no object."""
    if isinstance(value, BadRow):
        raise value
    if not isinstance(value, dict):
        raise BadRow(NOT_AN_OBJECT, type(value).__name__)
    # Parquet gives every row every column: an absent value is None there
    value = {key: item for key, item in value.items() if item is not None}
    if columns:
        found = {key: value[name] for key, name in columns.items() if name in value}
        value = {**{key: item for key, item in value.items() if key not in columns}, **found}
    return value


def without_prompt(names: Sequence[str], columns: Mapping[str, str]) -> BadRow:
    """Return what to raise for a row with no column of `names`: it says what those are called in the file."""
    looked_for = filter(None, (columns.get(name, name) for name in names))
    return BadRow(NO_PROMPT, f"looked for {', '.join(looked_for)}; name its column in data_args")


def _parse_prompt(value: dict[str, Any], columns: Mapping[str, str]) -> tuple[tuple[FrozenDict, ...], str | None]:
    names = ("messages", "prompt", "conversations")
    column = next((name for name in names if name in value), None)
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


def _question(messages: tuple[FrozenDict, ...]) -> tuple[FrozenDict, ...]:
    """Return a conversation up to the turn that is to be answered."""
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not any(message["content"].strip() for message in asked):
        raise BadRow(EMPTY, "nothing before the assistant's turn")
    return tuple(asked)


def parse_messages(messages: Any) -> tuple[FrozenDict, ...]:
    """Return the conversation in a list, or in a JSON string of one, also in ShareGPT's form; raises `BadRow`."""
    if isinstance(messages, str):
        if not messages.strip():
            raise BadRow(EMPTY)
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise BadRow(NOT_JSON, f"messages: {str(error)[:80]}") from None
    if not isinstance(messages, list):
        raise BadRow(WRONG_TYPE, f"messages must be a list, not {type(messages).__name__}")
    messages = [_with_role(message) for message in messages]
    for message in messages:
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise BadRow(WRONG_TYPE, f"every message needs a text in {key!r}")
            encodable(message[key], key)
    if not any(message["content"].strip() for message in messages):
        raise BadRow(EMPTY)
    # Parquet gives every message the keys of all: an absent one is None there
    return freeze([{key: item for key, item in message.items() if item is not None} for message in messages])


def parse_shared_gpt(value: dict[str, Any]) -> tuple[FrozenDict, ...]:
    """Return ShareGPT's `conversations`, after a text `system` where they do not begin with one; raises `BadRow`."""
    messages, system = parse_messages(value["conversations"]), value.get("system")
    if not isinstance(system, str) or not system.strip() or messages[0]["role"] == "system":
        return messages
    return (*parse_messages([{"role": "system", "content": system}]), *messages)


def _with_role(message: Any) -> dict[str, Any]:
    """Return a message; one of ShareGPT's form, `{"from", "value"}`, as `{"role", "content"}`."""
    if not isinstance(message, dict):
        raise BadRow(WRONG_TYPE, f"a message must be an object, not {type(message).__name__}")
    if message.get("role") is not None or message.get("from") is None:
        return message
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise BadRow(WRONG_TYPE, f"no speaker {speaker!r} is known; known are {', '.join(_SPEAKERS)}")
    rest = {key: item for key, item in message.items() if key not in ("from", "value", "role", "content")}
    return {"role": _SPEAKERS[speaker], "content": message.get("value"), **rest}


def encodable(text: str, name: str) -> str:
    """Return `text`; raises `BadRow` where no tokenizer takes it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow(WRONG_TYPE, f"{name} holds half of a surrogate pair, which no tokenizer takes") from None
    return text


def _text(value: dict[str, Any], key: str) -> str | None:
    """Return a text field; numbers are taken as their text, because ids and answers are often written so."""
    item = value.get(key)
    if item is None:
        return None
    if isinstance(item, str):
        return encodable(item, key)
    if isinstance(item, int | float) and not isinstance(item, bool):
        return str(item)
    raise BadRow(WRONG_TYPE, f"{key} must be a text or a number, not {type(item).__name__}")
