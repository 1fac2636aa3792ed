"""Regular expressions of users and rows, matched with a timeout.

Python's own engine cannot be stopped in the middle of `(a+)+b`; the package `regex` can.
"""

from typing import Any

import regex

from roll_opd.rewards.interface import RewardError

SECONDS = 0.5  # per text; a normal pattern needs milliseconds


Pattern = Any  # a `regex.Pattern`, which the package does not export as a type


class PatternTimeout(Exception):
    """A match took longer than `SECONDS`."""


def compiled(reward: str, key: str, pattern: object) -> Pattern:
    """Compile a pattern in which `.` matches newlines; raises `RewardError` if it is invalid."""
    if not isinstance(pattern, str):
        raise RewardError(f"reward {reward}: {key} is {pattern!r}; write a regular expression")
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise RewardError(
            f"reward {reward}: {key} is not a regular expression: {error}; correct {pattern!r}"
        ) from error


def matches(pattern: Pattern, text: str, whole: bool) -> bool:
    """Return whether the `whole` text, or else a part of it, matches; raises `PatternTimeout`."""
    match = pattern.fullmatch if whole else pattern.search
    try:
        return match(text, timeout=SECONDS) is not None
    except TimeoutError:
        raise PatternTimeout(
            f"{pattern.pattern!r} took more than {SECONDS} s on {len(text)} characters; write it without"
            " repetitions inside repetitions"
        ) from None
