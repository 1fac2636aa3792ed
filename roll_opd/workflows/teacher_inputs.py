"""What teachers with a context of their own read before what a run has made."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from roll_opd.base.frozen import freeze
from roll_opd.config.plan import ContextPlan
from roll_opd.data.prompt_source import Prompt
from roll_opd.data.rows import BadRow, Row
from roll_opd.data.teacher_prompts import TeacherPrompts
from roll_opd.workflows.model import RunState


class TeacherContexts:
    """The contexts of a run's teachers, put around the prompts of the calls that a workflow makes."""

    def __init__(self, contexts: Sequence[ContextPlan], tokenizer: Any) -> None:
        """`tokenizer` is the student's."""
        self._contexts, self._prompts = contexts, TeacherPrompts(contexts, tokenizer)

    def prompts(self, tokens: np.ndarray, run: RunState, prompt: Prompt) -> dict[str, np.ndarray]:
        """Return what each teacher reads in the place of a prompt's `tokens`, int64 [P], by teacher.

        ValueError where the run has not asked with these tokens, and where its teachers cannot read what it asked with.
        """
        if not self._contexts:
            return {}
        row = self._row(tokens, run, prompt)
        try:
            (found,) = self._prompts.encode([self._prompts.texts(row, "native")])
        except BadRow as bad:
            raise ValueError(f"{bad.kind}: {bad.detail}") from None
        if too_long := self._prompts.too_long(found):
            raise ValueError(too_long)
        return found

    def _row(self, tokens: np.ndarray, run: RunState, prompt: Prompt) -> Row:
        """Return the request that began with `tokens` as a row of its own."""
        key = self._contexts[0].key
        call = next((c for c in run.calls_made if np.array_equal(c.tokens[: c.start], tokens)), None)
        messages, text = (call.messages, None) if call else ((), run.texts.get(tokens.astype(np.int64).tobytes()))
        if call is None and text is None:
            raise ValueError(f"{key}: an experience begins with what the model was not asked; return what it answered")
        if call and call.tools:
            raise ValueError(f"{key}: a prompt with tools cannot be given another context; leave them or it out")
        if messages and messages[-1].get("role") == "assistant":
            raise ValueError(f"{key}: a prompt that ends in an answer cannot be given another context")
        kept = tuple(freeze(message) for message in messages)
        return Row(prompt.id, prompt.tag, kept, text, prompt.ground_truth, extra=prompt.extra)
