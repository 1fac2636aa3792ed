"""The hint at a misspelt name: the known name that it really resembles, or none."""

import difflib
from collections.abc import Iterable

RESEMBLES = 0.75  # share of letters in common and in order; below it a hint names something else than what was meant


def nearest(name: str, known: Iterable[str], at_least: float = RESEMBLES) -> str | None:
    """Return the one of `known` that `name` is a misspelling of, None where it resembles none of them."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=at_least)
    return found[0] if found else None
