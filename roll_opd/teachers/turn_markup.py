"""Text that a chat template writes around the turns after an answer, found by rendering a probe conversation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

ROLES = ("user", "tool")  # of turns between two answers
_QUESTION, _ANSWER, _CONTENT = "roll-opd-question", "roll-opd-answer", "roll-opd-content"

Render = Callable[[Sequence[Mapping[str, Any]]], str]  # messages, with the opening of the next answer


@dataclass(frozen=True)
class ObservedTurn:
    """A turn between two answers."""

    role: str
    content: bytes


@dataclass(frozen=True)
class TurnMarkup:
    """Text around a turn between two answers, by role."""

    around: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # role -> text before, after its content
    end: str = ""  # text of the token that ends an answer, at the start of the text before

    def parts(self, role: str, *, ended: bool) -> tuple[str, str]:
        """Return the text before and after the content; `ended`: the answer already ends with its end token."""
        before, after = self.around[role]
        return before.removeprefix(self.end) if ended else before, after

    def split(self, data: bytes, *, ended: bool) -> ObservedTurn | None:
        """Return the turn that `data` between two answers encodes in this template; None if not exactly one turn."""
        for role in self.around:
            before, after = (part.encode() for part in self.parts(role, ended=ended))
            if len(data) >= len(before) + len(after) and data.startswith(before) and data.endswith(after):
                content = data[len(before) : len(data) - len(after)]
                if not (self.end and self.end.encode() in content):
                    return ObservedTurn(role, content)
        return None


NO_MARKUP = TurnMarkup()


def turn_markup(render: Render, end: str) -> TurnMarkup:
    """Return a template's markup, without roles that it refuses; `end`: text of the token that ends an answer."""
    around = {}
    for role in ROLES:
        turns = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _ANSWER},
            {"role": role, "content": _CONTENT},
        ]
        try:
            text = render(turns)
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError):
            continue
        _, found, rest = text.rpartition(_ANSWER)
        before, has_content, after = rest.partition(_CONTENT)
        if found and has_content:
            around[role] = (before, after)
    return TurnMarkup(around, end)
