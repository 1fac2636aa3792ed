"""Regular expressions that users and rows bring, run against any text within a time.

Python's own engine cannot be stopped in the middle of `(a+)+b`; the package `regex` can.
"""

from typing import Any

import regex

from roll_opd.rewards.interface import RewardError

SECONDS = 0.5  # for one text; an honest pattern needs milliseconds


Pattern = Any  # a `regex.Pattern`, which the package does not export as a type


class PatternTimeout(Exception):
    """A match took longer than `SECONDS`."""


def compiled(reward: str, key: str, pattern: object) -> Pattern:
    """Return `pattern` compiled, `.` matching newlines; `RewardError` where it is no regular expression."""
    if not isinstance(pattern, str):
        raise RewardError(f"reward {reward}: {key} is {pattern!r}; write a regular expression")
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise RewardError(f"reward {reward}: {key} is no regular expression: {error}; correct {pattern!r}") from error


def matches(pattern: Pattern, text: str, whole: bool) -> bool:
    """Return whether the `whole` text matches, or else a part of it; `PatternTimeout` where that takes too long."""
    match = pattern.fullmatch if whole else pattern.search
    try:
        return match(text, timeout=SECONDS) is not None
    except TimeoutError:
        raise PatternTimeout(
            f"{pattern.pattern!r} took more than {SECONDS} s on {len(text)} characters; write it without"
            " repetitions inside repetitions"
        ) from None
