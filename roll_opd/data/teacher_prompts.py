"""What teachers read in the place of the student's prompt: a system message, a hint made of the row, another template.

The response that follows it is the student's, token by token; nothing here touches that.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.base.frozen import FrozenDict, thaw
from roll_opd.config.plan import ContextPlan
from roll_opd.data.rows import BadRow, Row, is_missing
from roll_opd.data.templates import PromptText, load_tokenizer, render_prompt, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_CONTEXT = "lacks what a teacher is to read"  # a kind of bad rows
PROMPT = "prompt"  # in a hint: the text of the user's last message
_PART = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")  # other braces, as in \boxed{}, are text


class TeacherPrompts:
    """Makes the prompts of teachers with a context of their own."""

    def __init__(self, contexts: Sequence[ContextPlan], tokenizer: "PreTrainedTokenizerBase") -> None:
        """`tokenizer` is the student's; DataError where a teacher's own does not load."""
        self._contexts = {
            context.name: (context, load_tokenizer(context.tokenizer) if context.tokenizer else tokenizer)
            for context in contexts
        }

    def texts(self, row: Row, template: str) -> dict[str, PromptText]:
        """Return what each teacher reads before the answer to `row`, by name, of those that its tag goes to.

        `template` is the row's own, where a teacher has none. BadRow where the row lacks what a context is made of,
        DataError where a template refuses it.
        """
        found = {}
        for name, (context, tokenizer) in self._contexts.items():
            if context.tags is None or row.tag in context.tags:
                found[name] = render_prompt(tokenizer, read_row(context, row), context.template or template)
        return found

    def encode(self, rows: Sequence[Mapping[str, PromptText]]) -> list[dict[str, np.ndarray]]:
        """Return the tokens of each text of each row, int64 [P]."""
        encoded: list[dict[str, np.ndarray]] = [{} for _ in rows]
        for name, (_, tokenizer) in self._contexts.items():
            numbers = [number for number, texts in enumerate(rows) if name in texts]
            ids = tokenize(tokenizer, [rows[number][name] for number in numbers])
            for number, tokens in zip(numbers, ids, strict=True):
                encoded[number][name] = np.asarray(tokens, dtype=np.int64)
        return encoded

    def too_long(self, prompts: Mapping[str, np.ndarray]) -> str | None:
        """Say which prompt is longer than its teacher's limit; None where none is."""
        for name, tokens in prompts.items():
            context = self._contexts[name][0]
            if len(tokens) > context.prompt_length:
                return f"{len(tokens)} tokens for {context.key}, whose prompt_length is {context.prompt_length}"
        return None


def read_row(context: ContextPlan, row: Row) -> Row:
    """Return `row` as a teacher with `context` reads it. BadRow where that cannot be made of it."""
    hint, system = context.hint, context.system_prompt
    if row.prompt is not None:
        if system is not None:
            raise BadRow(NO_CONTEXT, f"{context.key}: a plain prompt has no place for a system_prompt; write a hint")
        if hint is None:
            return row
        if PROMPT not in names_in(hint):
            raise BadRow(NO_CONTEXT, f"{context.key}: say with {{prompt}} where a plain prompt stands in the hint")
        return replace(row, prompt=_filled(hint, row, row.prompt, context.key))
    messages = list(row.messages)
    if hint is not None:
        places = [place for place, message in enumerate(messages) if message["role"] == "user"]
        if not places:
            raise BadRow(NO_CONTEXT, f"{context.key}: no message of a user for the hint")
        asked = messages[places[-1]]["content"]
        text = _filled(hint, row, asked, context.key)
        whole = text if PROMPT in names_in(hint) else f"{asked}\n\n{text}"
        messages[places[-1]] = FrozenDict({**messages[places[-1]], "content": whole})
    if system is not None:
        rest = messages[1:] if messages[0]["role"] == "system" else messages
        messages = [FrozenDict({"role": "system", "content": _filled(system, row, "", context.key)}), *rest]
    return replace(row, messages=tuple(messages))


def names_in(text: str) -> set[str]:
    """Return the names in braces that a text is to be filled with."""
    return {name for name in _PART.findall(text) if name}


def _filled(text: str, row: Row, prompt: str, key: str) -> str:
    own: dict[str, Any] = {PROMPT: prompt, "ground_truth": row.ground_truth, "id": row.id, "tag": row.tag}

    def part(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group()[0]
        value = own[name] if name in own else row.extra.get(name)
        if is_missing(value):
            raise BadRow(NO_CONTEXT, f"{key}: no {name!r} in the row; braces that are text are written {{{{ }}}}")
        return value if isinstance(value, str) else json.dumps(thaw(value), ensure_ascii=False)

    return _PART.sub(part, text)
