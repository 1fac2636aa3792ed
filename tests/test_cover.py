"""Covers of grids of cases, and the groups of tests: by enumeration, and over the existing files."""

from itertools import combinations, product
from pathlib import Path

import pytest

from tests.cover import cover, tiered
from tests.groups import ORDER, group_of, place_of

ROOT = Path(__file__).parent.parent
GRID = list(product("abcd", range(3), (True, False)))


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (3, 24)])
def test_a_cover_has_every_combination_of_values_and_few_cases(strength: int, most: int) -> None:
    chosen = cover(GRID, strength=strength)
    for places in combinations(range(3), strength):
        wanted = {tuple(case[place] for place in places) for case in GRID}
        assert {tuple(case[place] for place in places) for case in chosen} == wanted
    assert len(chosen) <= most
    assert chosen == [case for case in GRID if case in chosen]
    assert cover(GRID, strength=strength) == chosen


def test_a_cover_may_be_of_properties_of_the_cases() -> None:
    names = ["short", "tall", "longer", "longest"]
    assert cover(names, of=lambda name: (len(name) > 5, name[0])) == ["short", "tall", "longer"]


def test_cases_outside_the_cover_are_nightly() -> None:
    marked = tiered(["a", "b", ("c", 1)], ["b"])
    assert [param.values for param in marked] == [("a",), ("b",), ("c", 1)]
    assert [[mark.name for mark in param.marks] for param in marked] == [["nightly"], [], ["nightly"]]


def test_groups_and_expensive_files_exist_and_come_first() -> None:
    files = [str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")]
    assert set(ORDER) <= {group_of(f"{path}::test_any[a::b]") for path in files}
    assert {place_of(f"{path}::test_any") for path in files} == set(range(len(ORDER) + 1))
    assert place_of(f"tests/{Path(__file__).name}::test_any") == len(ORDER)
