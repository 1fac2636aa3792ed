"""Teacher prompts for workflow calls: add each teacher's context to the prompt of a recorded call."""

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
    """Builder of teacher prompts from the model calls of a workflow."""

    def __init__(self, contexts: Sequence[ContextPlan], tokenizer: Any) -> None:
        """Create a builder with the student's `tokenizer`."""
        self._contexts, self._prompts = contexts, TeacherPrompts(contexts, tokenizer)

    def prompts(self, tokens: np.ndarray, run: RunState, prompt: Prompt) -> dict[str, np.ndarray]:
        """Return teacher -> prompt tokens that replace the student's prompt `tokens`, int64 [P].

        Raises ValueError if no call of the run has these tokens, or a context cannot be added to the call's prompt.
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
        """Return the call with the prompt `tokens` as a dataset row."""
        key = self._contexts[0].key
        call = next((c for c in run.calls_made if np.array_equal(c.tokens[: c.start], tokens)), None)
        messages, text = (call.messages, None) if call else ((), run.texts.get(tokens.astype(np.int64).tobytes()))
        if call is None and text is None:
            raise ValueError(
                f"{key}: the prompt of an experience was not sent to the model; return the model's experiences"
            )
        if call and call.tools:
            raise ValueError(f"{key}: a teacher context cannot be added to a prompt with tools; remove one of them")
        if messages and messages[-1].get("role") == "assistant":
            raise ValueError(f"{key}: a teacher context cannot be added to a prompt that ends in an assistant message")
        kept = tuple(freeze(message) for message in messages)
        return Row(prompt.id, prompt.tag, kept, text, prompt.ground_truth, extra=prompt.extra)
