"""Find the markup of a chat template: the text that it adds before and after a turn that follows an answer.

To find this text, a short conversation is rendered with the template.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

ROLES = ("user", "tool")  # roles of the turns between two answers
_QUESTION, _ANSWER, _CONTENT = "roll-opd-question", "roll-opd-answer", "roll-opd-content"

Render = Callable[[Sequence[Mapping[str, Any]]], str]  # renders messages, followed by the start of the next answer


@dataclass(frozen=True)
class ObservedTurn:
    """A turn between two answers."""

    role: str
    content: bytes


@dataclass(frozen=True)
class TurnMarkup:
    """The text that a chat template adds before and after a turn that is not an answer, by the role of the turn."""

    around: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # role -> text before and after the content
    end: str = ""  # text of the token that ends an answer; the text before the content starts with it

    def parts(self, role: str, *, ended: bool) -> tuple[str, str]:
        """Return (text before the content, text after the content).

        Args:
            role: role of the turn.
            ended: whether the answer before the turn already has its end token.
        """
        before, after = self.around[role]
        return before.removeprefix(self.end) if ended else before, after

    def split(self, data: bytes, *, ended: bool) -> ObservedTurn | None:
        """Return the turn in the text between two answers, or None if the text is not exactly one turn.

        Args:
            data: the text between the answers.
            ended: whether the answer before the turn already has its end token.
        """
        for role in self.around:
            before, after = (part.encode() for part in self.parts(role, ended=ended))
            if len(data) >= len(before) + len(after) and data.startswith(before) and data.endswith(after):
                content = data[len(before) : len(data) - len(after)]
                if not (self.end and self.end.encode() in content):
                    return ObservedTurn(role, content)
        return None


NO_MARKUP = TurnMarkup()


def turn_markup(render: Render, end: str) -> TurnMarkup:
    """Return the markup of a chat template, for each role that the template accepts.

    Args:
        render: renders messages with the template.
        end: text of the token that ends an answer.
    """
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
