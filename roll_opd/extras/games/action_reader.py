"""`ActionReader`: finds the action of a response with a regular expression."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from roll_opd.extras.games.environment_interface import EnvironmentFailure

PATTERN = "<answer>(.*?)</answer>"
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
SECONDS = 1.0  # timeout of a search, against catastrophic backtracking
MAX_CHARACTERS = 32_768  # only the last characters of a response are searched


@dataclass(frozen=True)
class Action:
    """An action parsed from a response."""

    action: Any | None  # key in the action table, or the text if there is no table; None: invalid
    content: str = ""  # text of the response
    thought: str = ""

    @property
    def info(self) -> dict[str, Any]:
        """The entries of `info`, with ROLL's keys."""
        return {"action": self.action, "action_content": self.content, "think_content": self.thought}


INVALID = Action(None)


class ActionReader:
    """Parser of actions with a regular expression.

    A pattern with one group captures the action. A pattern with two groups captures the thought and then the action.
    """

    def __init__(
        self, pattern: str, lookup: Mapping[Any, str] | None = None, special_tokens: Sequence[str] | None = None
    ) -> None:
        """Create a parser.

        `lookup` maps keys to the names of actions, which are case-insensitive. Without `lookup`, any non-empty text is
        an action. Raises `EnvironmentFailure` for an invalid pattern and for duplicate names.
        """
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise EnvironmentFailure(f"action_pattern {pattern!r} is not a regular expression: {error}") from None
        if self._pattern.groups not in (1, 2):
            raise EnvironmentFailure(
                f"action_pattern {pattern!r} has {self._pattern.groups} groups; write one group for the action, or"
                " two groups for thought and action"
            )
        self._keys = None if lookup is None else {name.strip().lower(): key for key, name in lookup.items()}
        if lookup is not None and len(self._keys or ()) != len(lookup):
            raise EnvironmentFailure(f"action_lookup gives two actions one name: {dict(lookup)}; names must differ")
        self._special_tokens = [token for token in special_tokens or () if token]

    def add_names(self, names: Mapping[str, Any]) -> None:
        """Add alternative names of actions, as a dict: lower-case name -> key."""
        self._keys = {**names, **(self._keys or {})}

    def read(self, response: Any) -> Action:
        """Return the first action in a response, or INVALID if there is none, for example because it is not a text."""
        if not isinstance(response, str):
            return INVALID
        for token in self._special_tokens:
            response = response.replace(token, "")
        try:
            found = self._pattern.search(response.strip()[-MAX_CHARACTERS:], timeout=SECONDS)
        except TimeoutError:
            return INVALID
        if found is None:
            return INVALID
        *thoughts, content = [(group or "").strip() for group in found.groups()]
        action = (content or None) if self._keys is None else self._keys.get(content.lower())
        return Action(action, content, "".join(thoughts))
