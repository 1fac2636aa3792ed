"""Parse supervised rows: a prompt and its answers.

A row of the schema sft has one answer. A row of the schema dpo has two answers, chosen and rejected.

Three forms of rows are supported:
    conversations;
    TRL's columns: prompt and completion, or prompt, chosen and rejected;
    the columns instruction and output, as in ROLL and Alpaca.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan
from roll_opd.data.data_checks import NOT_LEARNED
from roll_opd.data.messages import loss_mark, unread_marks, without_marks
from roll_opd.data.row_formats import (
    EMPTY,
    WRONG_TYPE,
    BadRow,
    Row,
    encodable,
    first_present,
    parse_messages,
    parse_row,
    parse_shared_gpt,
    parse_task,
    rename_columns,
    with_system_prompt,
    without_prompt,
)

NO_ANSWER = "without an answer"
SAME_ANSWER = "chosen and rejected are equal"
OTHER_PROMPT = "answers to different prompts"

# columns of the answer in schema sft: the configured one, else the first that is present
_ANSWER = ("response", "completion", "output")
# column -> configuration key that names it
COLUMN_KEYS = {
    "instruction": "prompt_key",
    "input": "query_key",
    "system": "system_key",
    "output": "response_key",
    "chosen": "chosen_key",
    "rejected": "rejected_key",
}
_ADDED = ("input", "system")  # these are parts of the prompt only if a key names their column
HISTORY = "history"  # Alpaca's earlier turns, which are not supported
_PROMPT = ("instruction", *_ADDED)  # columns of a prompt that is not written as messages

Message = FrozenDict  # {"role": str, "content": str, ...}
Question = tuple[Message, ...] | str | None  # a conversation, a text, or no question


@dataclass(frozen=True)
class Schema:
    """The columns of a supervised row, and the function that splits the row into a prompt and its answers."""

    columns: tuple[str, ...]  # in addition to the columns of every row
    # (row, question that may end with an answer, column names) -> (prompt, answers)
    split: Callable[[dict[str, Any], Question, Mapping[str, str]], tuple[Question, tuple[Message, ...]]]
    has_prompt_keys: bool  # whether the configuration may name the columns of the prompt


def parse_answered(value: Any, fallback_id: str, plan: DataPlan) -> Row:
    """Parse a decoded row, including the answers that `plan.schema` requires. Raises `BadRow`.

    `plan.columns` maps names of columns in this package to their names in the file. As in ROLL, the columns `input` and
    `system` are read only if the configuration names them.
    """
    try:
        return with_system_prompt(_parsed(value, fallback_id, plan), plan.system_prompt)
    except RecursionError:
        raise BadRow(WRONG_TYPE, "its lists and objects are nested too deeply") from None


def _parsed(value: Any, fallback_id: str, plan: DataPlan) -> Row:
    if plan.schema == "task":
        return parse_task(value, fallback_id, plan.columns)
    if plan.schema not in SCHEMAS:
        return parse_row(value, fallback_id, plan.columns)
    schema = SCHEMAS[plan.schema]
    value = rename_columns(value, plan.columns)
    question = _question(value, plan.columns)
    prompt, answers = schema.split(value, question, plan.columns)
    if prompt is None:
        raise without_prompt(("messages", "instruction", "prompt", "conversations"), plan.columns)
    unread = set(unread_marks(value))
    for place, marked in (("the row", value), *(("its answer", answer) for answer in answers)):
        mark = loss_mark(marked)
        if mark and not mark[1]:
            raise BadRow(NOT_LEARNED, f"{mark[0]} {marked[mark[0]]} of {place}")
    for answer in answers:
        if not answer["content"].strip() and not answer.get("tool_calls"):
            raise BadRow(EMPTY, "an answer")
        unread.update(unread_marks(answer))
    answers = tuple(map(_unmarked, answers))
    rest = {key: item for key, item in value.items() if key not in (*schema.columns, "conversations")}
    row = parse_row({**rest, **_as_keys(prompt)}, fallback_id, has_answers=True)
    ignored = _unread(value, question, plan.columns) if prompt is question else ()
    return replace(row, answers=answers, unread=(*row.unread, *ignored, *sorted(unread)))


def _unread(value: dict[str, Any], question: Question, columns: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns of the question that are not empty but ignored, because no configuration key names them."""
    if _is_instruction(value, columns):
        names: tuple[str, ...] = tuple(name for name in (*_ADDED, HISTORY) if name not in columns)
    else:
        has_system = isinstance(question, tuple) and question[0]["role"] == "system"
        names = ("system",) if isinstance(value.get("system"), str) and not has_system else ()
    return tuple(name for name in names if str(value.get(name) or "").strip())


def _is_instruction(value: dict[str, Any], columns: Mapping[str, str]) -> bool:
    """Return whether the question is in the column `instruction`.

    If the row also has the column `messages`, `instruction` is read only if a configuration key names it.
    """
    named = columns.get("instruction", "messages") != "messages"
    return "instruction" in value and (named or "messages" not in value)


def _question(value: dict[str, Any], columns: Mapping[str, str]) -> Question:
    """Return the question of a row. If the last turn of `messages` is an answer, the question includes it."""
    if _is_instruction(value, columns):
        parts = [_text(value, "instruction")]
        if "input" in columns and value.get("input"):
            parts.append(_text(value, "input"))
        turns = [{"role": "user", "content": "\n".join(parts)}]
        if "system" in columns and value.get("system"):
            turns.insert(0, {"role": "system", "content": _text(value, "system")})
        return parse_messages(turns)
    name = first_present(value, ("messages", "prompt", "conversations"))
    if name == "messages":
        return parse_messages(value["messages"])
    if name == "conversations":
        return parse_shared_gpt(value)
    prompt = value.get("prompt")
    return parse_messages(prompt) if isinstance(prompt, list) else prompt


def _one_answer(
    value: dict[str, Any], question: Question, columns: Mapping[str, str]
) -> tuple[Question, tuple[Message, ...]]:
    named = [name for name in _ANSWER if name in columns and name in value]
    if isinstance(question, tuple) and question[-1]["role"] == "assistant":
        if not named:
            question = _up_to_learned(question)
            return question[:-1], (question[-1],)
        question = question[:-1]  # an answer in the configured column replaces the last turn
    name = first_present(value, (*named, *_ANSWER))
    if name is None:
        raise BadRow(
            NO_ANSWER, f"messages do not end with an assistant's turn, and there is no column {', '.join(_ANSWER)}"
        )
    before, answer = _answer(value, name)
    return _prompt(question, before, name), (answer,)


def _up_to_learned(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return a conversation up to and including the turn on which the model is trained.

    In most cases this is the last turn. If the last turn has loss weight 0, it is the last earlier turn of the
    assistant that has loss weight 1. If there is no such turn, the conversation is returned unchanged.
    """
    mark = loss_mark(messages[-1])
    if mark is None or mark[1]:
        return messages
    for place in range(len(messages) - 2, 0, -1):
        earlier = loss_mark(messages[place])
        if messages[place]["role"] == "assistant" and earlier and earlier[1]:
            return messages[: place + 1]
    return messages


def _two_answers(
    value: dict[str, Any], question: Question, columns: Mapping[str, str]
) -> tuple[Question, tuple[Message, ...]]:
    for name in ("chosen", "rejected"):
        if name not in value:
            raise BadRow(NO_ANSWER, name)
    (before, chosen), (other, rejected) = _answer(value, "chosen"), _answer(value, "rejected")
    before, other = tuple(map(_unmarked, before)), tuple(map(_unmarked, other))
    if before != other:
        raise BadRow(OTHER_PROMPT)
    if _unmarked(chosen) == _unmarked(rejected):
        raise BadRow(SAME_ANSWER)
    return _prompt(question, before, "chosen"), (chosen, rejected)


def _prompt(question: Question, before: tuple[Message, ...], name: str) -> Question:
    """Return the prompt of a row: its question, followed by the messages before its answer.

    Args:
        question: the question of the row.
        before: the messages before the answer in the column `name`. They may repeat the question or its end, or
            continue it with tool calls and results of tools.
        name: the column of the answer.
    """
    if not before or question is None:
        return before or question
    continues = before[0]["role"] in ("assistant", "tool")
    if isinstance(question, tuple):
        question = tuple(map(_unmarked, question[:-1] if question[-1]["role"] == "assistant" else question))
        before = tuple(map(_unmarked, before))
        asks, repeats = (tuple(map(_trimmed, part)) for part in (question, before))
        if asks in (repeats[: len(asks)], repeats[-len(asks) :]):
            return before
        if asks[-len(repeats) :] == repeats:
            return question
        if continues:
            return (*question, *before)
        raise BadRow(
            OTHER_PROMPT,
            f"the prompt differs from the messages before the answer in {name}; remove the prompt or these messages",
        )
    if continues:
        raise BadRow(WRONG_TYPE, f"{name} continues a prompt that is a plain text; write the prompt as messages")
    return before


SCHEMAS = {
    "sft": Schema((*_ANSWER, *_PROMPT), _one_answer, has_prompt_keys=True),
    "dpo": Schema(("chosen", "rejected", *_PROMPT), _two_answers, has_prompt_keys=False),
}


def _answer(value: dict[str, Any], name: str) -> tuple[tuple[Message, ...], Message]:
    """Return (messages before the answer, answer) from the column `name`.

    If the column has a text or a single message, this is the answer. If it has several messages, the last message is
    the answer, and the other messages belong to the prompt.
    """
    item = value[name]
    if isinstance(item, str):
        return (), FrozenDict({"role": "assistant", "content": _text(value, name)})
    messages = parse_messages([item] if isinstance(item, dict) else item)
    if messages[-1]["role"] != "assistant":
        raise BadRow(NO_ANSWER, f"the last message of {name} is not a message of the assistant")
    return messages[:-1], messages[-1]


def _trimmed(message: Message) -> Message:
    return FrozenDict({**message, "content": message["content"].strip()})


def _unmarked(message: Message) -> Message:
    return FrozenDict(without_marks(message))


def _text(value: dict[str, Any], name: str) -> str:
    if not isinstance(value[name], str):
        raise BadRow(WRONG_TYPE, f"{name} must be a text, not {type(value[name]).__name__}")
    return encodable(value[name], name)


def _as_keys(question: tuple[Message, ...] | str) -> dict[str, Any]:
    if isinstance(question, tuple):
        return {"messages": tuple(map(_unmarked, question))}
    return {"prompt": question}  # `parse_row` refuses other types
