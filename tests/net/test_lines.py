"""Lines that tests execute: a function that moved to another file is compared with itself."""

from lines import Functions, fewer, share

EARLIER: Functions = {
    "a.py": {"one": (4, 4), "two": (1, 2), "<module>": (9, 9)},
    "b.py": {"one": (1, 4)},
}


def test_moved_functions_are_compared_with_themselves() -> None:
    later: Functions = {"room/a.py": {"one": (4, 4)}, "room/c.py": {"two": (1, 2)}, "b.py": {"one": (1, 4)}}
    assert fewer(EARLIER, later) == []


def test_a_smaller_share_is_named_and_a_removed_function_is_not() -> None:
    later: Functions = {"room/a.py": {"one": (3, 4)}, "b.py": {"one": (2, 4)}}
    assert fewer(EARLIER, later) == ["a.py -> room/a.py one: 4 of 4 -> 3 of 4"]


def test_the_share_is_of_all_lines() -> None:
    assert share(EARLIER) == 15 / 19
