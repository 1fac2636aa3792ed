"""Prompts of teachers that have a context.

The context is a hint from the row, or a system message or template that differs from the student's. The student's
response tokens follow the teacher's prompt unchanged.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.base.frozen import FrozenDict, thaw
from roll_opd.config.plan import ContextPlan
from roll_opd.data.row_formats import BadRow, Row, is_missing, number_text
from roll_opd.data.templates import PromptText, load_tokenizer, render_prompt, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_CONTEXT = "no value for a teacher's hint"  # a kind of bad rows
PROMPT = "prompt"  # placeholder in a hint for the text of the user's last message
_PART = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")  # other braces, such as those of \boxed{}, are text


class TeacherPrompts:
    """Renders and tokenises the prompts of teachers that have a context."""

    def __init__(self, contexts: Sequence[ContextPlan], tokenizer: "PreTrainedTokenizerBase") -> None:
        """Load the tokenizers of the teachers. Raises `DataError` if a tokenizer cannot be loaded.

        `tokenizer` is the student's tokenizer. It is used for contexts that do not name a tokenizer.
        """
        self._contexts = {
            context.name: (context, load_tokenizer(context.tokenizer) if context.tokenizer else tokenizer)
            for context in contexts
        }

    def texts(self, row: Row, template: str) -> dict[str, PromptText]:
        """Return the prompt text for each teacher that accepts the tag of `row`, as a dict: teacher -> text.

        `template` is used for teachers whose context has no template. Raises `BadRow` if the row lacks a value for a
        hint. Raises `DataError` if a template refuses the row.
        """
        found = {}
        for name, (context, tokenizer) in self._contexts.items():
            if context.tags is None or row.tag in context.tags:
                found[name] = render_prompt(tokenizer, read_row(context, row), context.template or template)
        return found

    def encode(self, rows: Sequence[Mapping[str, PromptText]]) -> list[dict[str, np.ndarray]]:
        """Tokenise the texts of each row. Returns a dict for each row: teacher -> tokens, int64 [P]."""
        encoded: list[dict[str, np.ndarray]] = [{} for _ in rows]
        for name, (_, tokenizer) in self._contexts.items():
            numbers = [number for number, texts in enumerate(rows) if name in texts]
            ids = tokenize(tokenizer, [rows[number][name] for number in numbers])
            for number, tokens in zip(numbers, ids, strict=True):
                encoded[number][name] = np.asarray(tokens, dtype=np.int64)
        return encoded

    def too_long(self, prompts: Mapping[str, np.ndarray]) -> str | None:
        """Return an error message about the first prompt that exceeds its teacher's limit, or None if all fit."""
        for name, tokens in prompts.items():
            context = self._contexts[name][0]
            if len(tokens) > context.prompt_length:
                return f"{len(tokens)} tokens for {context.key}, but its prompt_length is {context.prompt_length}"
        return None


def read_row(context: ContextPlan, row: Row) -> Row:
    """Return `row` with a teacher's hint and system message.

    Raises `BadRow` if the row has no place for the hint or the system message, or if a placeholder in them has no value
    in the row.
    """
    hint, system = context.hint, context.system_prompt
    if row.prompt is not None:
        if system is not None:
            raise BadRow(NO_CONTEXT, f"{context.key}: a plain prompt cannot have a system_prompt; write a hint")
        if hint is None:
            return row
        if PROMPT not in names_in(hint):
            raise BadRow(NO_CONTEXT, f"{context.key}: mark the place of a plain prompt in the hint with {{prompt}}")
        return replace(row, prompt=_filled(hint, row, row.prompt, context.key))
    messages = list(row.messages)
    if hint is not None:
        places = [place for place, message in enumerate(messages) if message["role"] == "user"]
        if not places:
            raise BadRow(NO_CONTEXT, f"{context.key}: no user message for the hint")
        question = messages[places[-1]]["content"]
        text = _filled(hint, row, question, context.key)
        whole = text if PROMPT in names_in(hint) else f"{question}\n\n{text}"
        messages[places[-1]] = FrozenDict({**messages[places[-1]], "content": whole})
    if system is not None:
        rest = messages[1:] if messages[0]["role"] == "system" else messages
        messages = [FrozenDict({"role": "system", "content": _filled(system, row, "", context.key)}), *rest]
    return replace(row, messages=tuple(messages))


def names_in(text: str) -> set[str]:
    """Return the names of the placeholders in a text. A placeholder is a name in braces."""
    return {name for name in _PART.findall(text) if name}


def _filled(text: str, row: Row, prompt: str, key: str) -> str:
    own: dict[str, Any] = {PROMPT: prompt, "ground_truth": row.ground_truth, "id": row.id, "tag": row.tag}

    def part(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group()[0]
        value = own[name] if name in own else row.extra.get(name)
        if is_missing(value):
            raise BadRow(NO_CONTEXT, f"{key}: no {name!r} in the row; write {{{{ }}}} for literal braces")
        if isinstance(value, Number) and not isinstance(value, bool):
            return number_text(value)
        return value if isinstance(value, str) else json.dumps(thaw(value), ensure_ascii=False)

    return _PART.sub(part, text)
