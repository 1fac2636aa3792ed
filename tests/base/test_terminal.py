"""Text and tables that fit a terminal."""

import pytest

from roll_opd.base.terminal import WIDTH, columns, table, wrapped
from roll_opd.commands.plan_text import to_text
from roll_opd.planner.load_plan import load_plan

TEXT = "roll-opd: the configuration has 2 problems:\n  1. max_steps: expected a number (run.yaml:3)\n  2. seed: is bad"
PATH = "/a/very/long/path/" + "x" * 60


@pytest.mark.parametrize("width", [20, 30, 43, 80, 500])
def test_words_are_kept_and_lines_fit(width: int) -> None:
    lines = wrapped(TEXT, width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert " ".join(lines).split() == TEXT.split()
    if width == 500:
        assert wrapped(TEXT, width) == TEXT


def test_what_belongs_to_an_item_stands_behind_it() -> None:
    assert wrapped("  - one two three\n  four five six seven", 12) == "\n".join(
        ["  - one two", "    three", "  four five", "    six", "    seven"]
    )


def test_a_path_stays_whole() -> None:
    assert wrapped(f"Run directory: {PATH} is new", 40).splitlines() == ["Run directory:", f"  {PATH}", "  is new"]


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "123")
    assert columns() == 123
    monkeypatch.setenv("COLUMNS", "3")
    assert columns() == 20
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))
    assert columns() == WIDTH == 80


def test_a_table_is_narrowed_where_it_is_widest() -> None:
    rows = [["role", "tp", "tags"], ["student_train", "16", "math, code, instructions and questions"]]
    wide = table(rows, 200)
    assert wide == ["  role           tp  tags", "  student_train  16  math, code, instructions and questions"]
    for width in range(24, 60):
        lines = table(rows, width)
        assert all(len(line) <= width for line in lines)
        joined = "".join("".join(lines).split())
        assert all(word in joined for word in ("16", "role")) and len(joined) == len("".join("".join(wide).split()))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_plan_fits(width: int) -> None:
    text = to_text(load_plan("demo", "rlvr_opd", pure=False), width)
    assert [line for line in text.splitlines() if len(line) > width] == []
