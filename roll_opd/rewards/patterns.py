"""Regular expressions of users and rows, with a timeout.

They are matched by the package `regex`, because Python's module `re` cannot be stopped while it matches a pattern such
as `(a+)+b`.
"""

from typing import Any

import regex

from roll_opd.rewards.interface import RewardError

SECONDS = 0.5  # time limit per text; a normal pattern needs milliseconds
Pattern = Any  # a `regex.Pattern`, which the package does not export as a type


class PatternTimeout(Exception):
    """A match took longer than `SECONDS`."""


def compiled(reward: str, key: str, pattern: object) -> Pattern:
    """Compile a pattern in which `.` also matches newlines; raise `RewardError` if the pattern is invalid."""
    if not isinstance(pattern, str):
        raise RewardError(f"reward {reward}: {key} is {pattern!r}; write a regular expression")
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise RewardError(
            f"reward {reward}: {key} is not a regular expression: {error}; correct {pattern!r}"
        ) from error


def matches(pattern: Pattern, text: str, whole: bool) -> bool:
    """Return whether a text matches a pattern; raise `PatternTimeout` if the match takes too long.

    Args:
        whole: whether the whole text must match; if False, a part of it suffices.
    """
    match = pattern.fullmatch if whole else pattern.search
    try:
        return match(text, timeout=SECONDS) is not None
    except TimeoutError:
        raise PatternTimeout(
            f"{pattern.pattern!r} took more than {SECONDS} s on {len(text)} characters; write it without"
            " nested repetitions"
        ) from None
