"""A small part of a grid of cases that still has every value of every parameter; the rest of the grid runs nightly."""

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest


def values_of(case: Any) -> tuple:
    return case if isinstance(case, tuple) else (case,)


def cover(cases: Iterable[Any], of: Callable[[Any], tuple] = values_of, strength: int = 1) -> list[Any]:
    """Return some of `cases` that have all values `of` them; with a strength of 2, all pairs of two values of a case.

    Greedy, and the same in every process: the first of the cases that add most, until nothing is missing.
    """
    cases = list(cases)
    parts = [set(combinations(enumerate(of(case)), strength)) for case in cases]
    missing, chosen = set().union(*parts), []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(missing & parts[number]))
        missing -= parts[best]
        chosen.append(best)
    return [cases[number] for number in sorted(chosen)]


def tiered(cases: Iterable[Any], pushed: Iterable[Any]) -> list[Any]:
    """Return all cases as parameters of a test, marked as nightly where they are not among `pushed`."""
    pushed = list(pushed)
    return [pytest.param(*values_of(case), marks=() if case in pushed else (pytest.mark.nightly,)) for case in cases]
