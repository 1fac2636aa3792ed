"""Select a small part of a grid of cases that has every value of every parameter; the other cases run nightly."""

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest


def values_of(case: Any) -> tuple:
    return case if isinstance(case, tuple) else (case,)


def cover(cases: Iterable[Any], of: Callable[[Any], tuple] = values_of, strength: int = 1) -> list[Any]:
    """Return some of `cases` that together have all values `of` the cases; with strength 2, all pairs of values.

    Greedy and deterministic: repeatedly add the first case with the most missing values, until no value is missing.
    """
    cases = list(cases)
    parts = [set(combinations(enumerate(of(case)), strength)) for case in cases]
    missing, chosen = set().union(*parts), []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(missing & parts[number]))
        missing -= parts[best]
        chosen.append(best)
    return [cases[number] for number in sorted(chosen)]


def repeats(pushed: int, nightly: int) -> list[Any]:
    """Return numbers of random repetitions as parameters of a test: few on every push, more in the nightly tier."""
    return [pushed, pytest.param(nightly, marks=pytest.mark.nightly)]


def tiered(cases: Iterable[Any], pushed: Iterable[Any]) -> list[Any]:
    """Return all cases as parameters of a test; cases that are not in `pushed` are marked as nightly."""
    pushed = list(pushed)
    return [pytest.param(*values_of(case), marks=() if case in pushed else (pytest.mark.nightly,)) for case in cases]
