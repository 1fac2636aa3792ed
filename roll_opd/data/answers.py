"""Rows that bring answers: one to learn (schema sft), or one to prefer to another (schema dpo).

Rows come as the field writes them: conversations, TRL's prompt and completion or prompt, chosen and rejected, ROLL's
and Alpaca's instruction and output. What is left when the answers are taken out is an ordinary prompt.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll_opd.config.frozen import FrozenDict
from roll_opd.config.plan import DataPlan
from roll_opd.data.rows import EMPTY, WRONG_TYPE, BadRow, Row, own_names, parse_messages, parse_row

NO_ANSWER = "without an answer"
SAME_ANSWER = "chosen and rejected are the same"
OTHER_PROMPT = "chosen and rejected answer different prompts"

_ANSWER = ("response", "completion", "output")  # of schema sft: the one a column is named for, else the first
_PROMPT = ("instruction", "input", "system")  # of a user's turn that the row does not write as messages
COLUMNS: dict[str, tuple[str, ...]] = {  # what a row of each schema may have besides what every row may
    "experience": (),
    "sft": (*_ANSWER, *_PROMPT),
    "dpo": ("chosen", "rejected", *_PROMPT),
}

Message = Mapping[str, Any]


def parse_answered(value: Any, fallback_id: str, plan: DataPlan) -> Row:
    """The row in a decoded value with the answers that `plan.schema` asks for; raises `BadRow`.

    `plan.columns` are those of `parse_row`, and of the names in `COLUMNS`. `input` and `system` count only where a
    column is named for them, as in ROLL.
    """
    if plan.schema == "experience":
        return parse_row(value, fallback_id, plan.columns)
    value = own_names(value, plan.columns)
    prompt = _asked(value, plan.columns)
    prompt, answers = _SPLIT[plan.schema](value, prompt, plan.columns)
    for answer in answers:
        if not answer["content"].strip():
            raise BadRow(EMPTY, "an answer")
    rest = {key: item for key, item in value.items() if key not in COLUMNS[plan.schema]}
    row = parse_row({**rest, **_as_keys(prompt)}, fallback_id)
    return replace(row, answers=answers)


Asked = tuple[Message, ...] | str | None  # a conversation, a text, or nothing


def _asked(value: dict[str, Any], columns: Mapping[str, str]) -> Asked:
    """What the row asks, its last turn's answer included where `messages` has one."""
    named = "instruction" in value and columns.get("instruction", "messages") != "messages"
    if "messages" in value and not named:  # who names a column means it
        return parse_messages(value["messages"])
    if "instruction" in value:
        parts = [_text(value, "instruction")]
        if "input" in columns and value.get("input"):
            parts.append(_text(value, "input"))
        turns = [{"role": "user", "content": "\n".join(parts)}]
        if "system" in columns and value.get("system"):
            turns.insert(0, {"role": "system", "content": _text(value, "system")})
        return parse_messages(turns)
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


_SPLIT = {"sft": _one_answer, "dpo": _two_answers}


def _answer(value: dict[str, Any], name: str) -> tuple[tuple[Message, ...], Message]:
    """What precedes the answer in `value[name]`, and the answer as a message.

    A text is the answer; so is a message. Of several messages the last one is, and the others are the prompt.
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
    return value[name]


def _as_keys(asked: Asked) -> dict[str, Any]:
    if asked is None:
        return {}
    if isinstance(asked, str):
        return {"prompt": asked}
    return {"messages": [dict(message) for message in asked]}
