"""Rows that bring answers: one to learn (schema sft), or one to prefer to another (schema dpo).

Rows come as the field writes them: conversations, TRL's prompt and completion or prompt, chosen and rejected, ROLL's
and Alpaca's instruction and output. What is left when the answers are taken out is an ordinary prompt.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll_opd.data.report import FileReport
from roll_opd.data.rows import (
    EMPTY,
    WRONG_TYPE,
    BadRow,
    Row,
    encodable,
    own_names,
    parse_messages,
    parse_row,
    parse_shared_gpt,
    parse_task,
    without_prompt,
)
from roll_opd.frozen import FrozenDict
from roll_opd.plan import DataPlan

NO_ANSWER = "without an answer"
SAME_ANSWER = "chosen and rejected are the same"
OTHER_PROMPT = "chosen and rejected answer different prompts"

_ANSWER = ("response", "completion", "output")  # of schema sft: the one a column is named for, else the first
# names of columns -> keys of a configuration that may name them otherwise
COLUMN_KEYS = {
    "instruction": "prompt_key",
    "input": "query_key",
    "system": "system_key",
    "output": "response_key",
    "chosen": "chosen_key",
    "rejected": "rejected_key",
}
_ADDED = ("input", "system")  # to an instruction, only where a key names the column
_PROMPT = ("instruction", *_ADDED)  # of a user's turn that the row does not write as messages

Message = FrozenDict  # {"role": str, "content": str, ...}
Asked = tuple[Message, ...] | str | None  # a conversation, a text, or nothing


@dataclass(frozen=True)
class Schema:
    """What the rows of a supervised pipeline hold. `SCHEMAS` has them by name."""

    columns: tuple[str, ...]  # what a row may have besides what every row may
    # (row, what it asks with an answer in its last turn included, names of its columns) -> what it asks, its answers
    split: Callable[[dict[str, Any], Asked, Mapping[str, str]], tuple[Asked, tuple[Message, ...]]]
    has_prompt_keys: bool  # whether the configuration can name the columns of the prompt


def columns_of(schema: str) -> tuple[str, ...]:
    """Return the names of columns that rows of `schema` may have besides those that every row may have."""
    return SCHEMAS[schema].columns if schema in SCHEMAS else ()


def parse_answered(value: Any, fallback_id: str, plan: DataPlan) -> Row:
    """Return the row in a decoded value with the answers that `plan.schema` asks for; raises `BadRow`.

    `plan.columns` are those of `parse_row`, and of the schema's columns. `input` and `system` count only where a column
    is named for them, as in ROLL.
    """
    try:
        return _parsed(value, fallback_id, plan)
    except RecursionError:
        raise BadRow(WRONG_TYPE, "its lists and objects are nested too deeply") from None


def _parsed(value: Any, fallback_id: str, plan: DataPlan) -> Row:
    if plan.schema == "task":
        return parse_task(value, fallback_id, plan.columns)
    if plan.schema not in SCHEMAS:
        return parse_row(value, fallback_id, plan.columns)
    schema = SCHEMAS[plan.schema]
    value = own_names(value, plan.columns)
    asked = _asked(value, plan.columns)
    prompt, answers = schema.split(value, asked, plan.columns)
    if prompt is None:
        raise without_prompt(("messages", "instruction", "prompt", "conversations"), plan.columns)
    for answer in answers:
        if not answer["content"].strip():
            raise BadRow(EMPTY, "an answer")
    rest = {key: item for key, item in value.items() if key not in (*schema.columns, "conversations")}
    row = parse_row({**rest, **_as_keys(prompt)}, fallback_id, has_answers=True)
    return replace(row, answers=answers, unread=_unread(value, plan.columns) if prompt is asked else ())


def unread_warnings(files: Sequence[FileReport], schema: str) -> tuple[str, ...]:
    """Say which columns beside an instruction are left out, in how many rows of `files`, and what adds them."""
    counts = sum((file.unread for file in files), Counter())
    warnings = []
    for name, count in counts.items():
        first, *others = (file.path for file in files if file.unread[name])
        where = f"{first} and {len(others)} more files" if others else first
        can_add = SCHEMAS[schema].has_prompt_keys
        remedy = f"{COLUMN_KEYS[name]}: {name} adds it" if can_add else "write it in `instruction`"
        having = "row has" if count == 1 else "rows have"
        warnings.append(f"{count} {having} `{name}`, which is left out; {remedy} ({where})")
    return tuple(warnings)


def _unread(value: dict[str, Any], columns: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns beside an instruction that hold something and that no key names."""
    if not _is_instruction(value, columns):
        return ()
    return tuple(name for name in _ADDED if name not in columns and str(value.get(name) or "").strip())


def _is_instruction(value: dict[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether the row asks by an instruction. Where it has `messages` as well, those who name a column mean it."""
    named = columns.get("instruction", "messages") != "messages"
    return "instruction" in value and (named or "messages" not in value)


def _asked(value: dict[str, Any], columns: Mapping[str, str]) -> Asked:
    """Return what the row asks, with the answer in the last turn where `messages` has one."""
    if _is_instruction(value, columns):
        parts = [_text(value, "instruction")]
        if "input" in columns and value.get("input"):
            parts.append(_text(value, "input"))
        turns = [{"role": "user", "content": "\n".join(parts)}]
        if "system" in columns and value.get("system"):
            turns.insert(0, {"role": "system", "content": _text(value, "system")})
        return parse_messages(turns)
    if "messages" in value:
        return parse_messages(value["messages"])
    if "prompt" not in value and "conversations" in value:
        return parse_shared_gpt(value)
    prompt = value.get("prompt")
    return parse_messages(prompt) if isinstance(prompt, list) else prompt


def _one_answer(value: dict[str, Any], asked: Asked, columns: Mapping[str, str]) -> tuple[Asked, tuple[Message, ...]]:
    named = [name for name in _ANSWER if name in columns and name in value]
    if isinstance(asked, tuple) and asked[-1]["role"] == "assistant":
        if not named:
            return asked[:-1], (asked[-1],)
        asked = asked[:-1]  # the named answer stands for the one at the end
    name = next((name for name in (*named, *_ANSWER) if name in value), None)
    if name is None:
        raise BadRow(NO_ANSWER, f"no assistant's turn at the end of messages, and none of {', '.join(_ANSWER)}")
    before, answer = _answer(value, name)
    return before or asked, (answer,)


def _two_answers(value: dict[str, Any], asked: Asked, columns: Mapping[str, str]) -> tuple[Asked, tuple[Message, ...]]:
    for name in ("chosen", "rejected"):
        if name not in value:
            raise BadRow(NO_ANSWER, name)
    (before, chosen), (other, rejected) = _answer(value, "chosen"), _answer(value, "rejected")
    if before != other:
        raise BadRow(OTHER_PROMPT)
    if chosen == rejected:
        raise BadRow(SAME_ANSWER)
    return before or asked, (chosen, rejected)


SCHEMAS = {
    "sft": Schema((*_ANSWER, *_PROMPT), _one_answer, has_prompt_keys=True),
    "dpo": Schema(("chosen", "rejected", *_PROMPT), _two_answers, has_prompt_keys=False),
}


def _answer(value: dict[str, Any], name: str) -> tuple[tuple[Message, ...], Message]:
    """Return the messages before the answer in `value[name]`, and the answer as a message.

    A text is the answer, and so is a single message. Of several messages the last is, and the others are the prompt.
    """
    item = value[name]
    if isinstance(item, str):
        return (), FrozenDict({"role": "assistant", "content": _text(value, name)})
    messages = parse_messages([item] if isinstance(item, dict) else item)
    if messages[-1]["role"] != "assistant":
        raise BadRow(NO_ANSWER, f"the last message of {name} is not the assistant's")
    return messages[:-1], messages[-1]


def _text(value: dict[str, Any], name: str) -> str:
    if not isinstance(value[name], str):
        raise BadRow(WRONG_TYPE, f"{name} must be a text, not {type(value[name]).__name__}")
    return encodable(value[name], name)


def _as_keys(asked: tuple[Message, ...] | str) -> dict[str, Any]:
    if isinstance(asked, tuple):
        return {"messages": [dict(message) for message in asked]}
    return {"prompt": asked}  # `parse_row` refuses what is no text
