"""Lists of tests: a renamed, moved or removed test is found or explained, and any other is missing."""

from collections import Counter
from pathlib import Path

import pytest
from collected import TABLE, Row, compared, read_table

EARLIER = ["a.py::test_x", "a.py::test_y[1]", "a.py::test_y[2]", "b.py::test_z[roll_opd/cli.py]"]


def test_moved_tests_are_found_by_their_names() -> None:
    later = ["c.py::test_x", "d.py::test_y[1]", "a.py::test_y[2]", "b.py::test_z[roll_opd/cli.py]"]
    found = compared(EARLIER, later, [])
    assert found.moved == {"a.py::test_x": "c.py::test_x", "a.py::test_y[1]": "d.py::test_y[1]"}
    assert (found.same, found.missing) == (2, [])


def test_a_name_in_two_new_files_is_no_move() -> None:
    found = compared(["a.py::test_x"], ["c.py::test_x", "d.py::test_x"], [])
    assert found.missing == ["a.py::test_x"]


def test_rows_of_the_table_rename_and_remove() -> None:
    rename = Row("*.py::test_y[*]", "*.py::test_why[*]", "named by its property")
    removed = Row("b.py::test_z[*]", "", "the module is gone")
    unused = Row("nowhere", "", "left over")
    later = ["a.py::test_x", "a.py::test_why[1]"]
    found = compared(EARLIER, later, [rename, removed, unused])
    assert found.explained == Counter({rename: 1, removed: 1})
    assert found.missing == ["a.py::test_y[2]"]  # the table names a test that does not exist
    assert found.unused == [unused]


def test_every_row_of_the_table_has_a_reason(tmp_path: Path) -> None:
    read_table(TABLE)
    (tmp_path / "table.csv").write_text("old,new,reason\na.py::test_x,,\n")
    with pytest.raises(ValueError, match="reason"):
        read_table(tmp_path / "table.csv")
