"""Read an action out of a model's response, by a pattern as ROLL's `action_pattern`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from roll_opd.environments.interface import EnvironmentFailure

PATTERN = "<answer>(.*?)</answer>"
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
SECONDS = 1.0  # a pattern may search; a response made for it could keep it busy for hours
LONGEST = 32_768  # characters of a response that are searched, its last ones


@dataclass(frozen=True)
class Action:
    """What a response says is to be done."""

    action: Any | None  # the key of the action, without a table of actions its text; None: no valid one
    content: str = ""  # as the model wrote it
    thought: str = ""

    @property
    def info(self) -> dict[str, Any]:
        """The keys of `info` under which ROLL has these."""
        return {"action": self.action, "action_content": self.content, "think_content": self.thought}


INVALID = Action(None)


class ActionReader:
    """Reads actions by one pattern: group 1 is the action, with two groups 1 is the thought and 2 the action."""

    def __init__(
        self, pattern: str, lookup: Mapping[Any, str] | None = None, special_tokens: Sequence[str] | None = None
    ) -> None:
        """`lookup`: names of actions, found in any case; None: any text but an empty one is an action.

        `EnvironmentFailure` for a pattern that is none, and for two actions of one name.
        """
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise EnvironmentFailure(f"action_pattern {pattern!r} is no regular expression: {error}") from None
        if self._pattern.groups not in (1, 2):
            raise EnvironmentFailure(
                f"action_pattern {pattern!r} has {self._pattern.groups} groups; write one around the action, or one"
                " around the thought and one around the action"
            )
        self._keys = None if lookup is None else {name.strip().lower(): key for key, name in lookup.items()}
        if lookup is not None and len(self._keys or ()) != len(lookup):
            raise EnvironmentFailure(f"action_lookup gives two actions one name: {dict(lookup)}; names must differ")
        self._special_tokens = [token for token in special_tokens or () if token]

    def also(self, names: Mapping[str, Any]) -> None:
        """Let other texts mean actions, too: text in lower case -> key."""
        self._keys = {**names, **(self._keys or {})}

    def read(self, response: Any) -> Action:
        """Return the first action in a response; one without a key where there is none. Any value is taken."""
        if not isinstance(response, str):
            return INVALID
        for token in self._special_tokens:
            response = response.replace(token, "")
        try:
            found = self._pattern.search(response.strip()[-LONGEST:], timeout=SECONDS)
        except TimeoutError:
            return INVALID
        if found is None:
            return INVALID
        *thoughts, content = [(group or "").strip() for group in found.groups()]
        action = (content or None) if self._keys is None else self._keys.get(content.lower())
        return Action(action, content, "".join(thoughts))
