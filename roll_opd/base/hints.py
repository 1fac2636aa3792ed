"""Spelling hints: find the known name that a misspelt name resembles."""

import difflib
from collections.abc import Iterable

RESEMBLES = 0.75  # minimum similarity ratio of difflib; below it hints are wrong


def nearest(name: str, known: Iterable[str], at_least: float = RESEMBLES) -> str | None:
    """Return the known name that `name` resembles most; None if it resembles none."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=at_least)
    return found[0] if found else None
