"""Compare two lists of collected tests: each test of the earlier list still exists, has moved, or is in the table with
a reason.

    python tests/net/collected.py record LIST
    python tests/net/collected.py compare EARLIER LATER

The table `moved_tests.csv` has the columns old, new, reason: ids in which `*` stands for any text, the same in `new` as
in `old`. A row with an empty `new` has the reason why a test was removed. A test without a row has moved if exactly one
new test in another file has its name, including parameters.
"""

import argparse
import csv
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parent / "moved_tests.csv"
SHOWN = 50  # missing tests that are printed


@dataclass(frozen=True)
class Row:
    """A row of the table: a pattern of ids, their new ids ("" for removed tests), and the reason."""

    old: str
    new: str
    reason: str

    def renamed(self, test: str) -> str | None:
        """Return the id that replaces `test`, "" if the test was removed, or None if the row is about other tests."""
        pattern = "(.*)".join(map(re.escape, self.old.split("*")))
        found = re.fullmatch(pattern, test, re.DOTALL)
        if found is None:
            return None
        texts = iter(found.groups())
        return re.sub(r"\*", lambda _: next(texts), self.new)


@dataclass(frozen=True)
class Comparison:
    """Number of unchanged tests, and the other tests: moved by name, moved by the table, or missing."""

    same: int
    moved: dict[str, str]
    explained: Counter[Row]
    missing: list[str]
    unused: list[Row]  # of the table


def read_table(file: Path = TABLE) -> list[Row]:
    """Return the rows of the table; ValueError for one without a reason."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [Row(row["old"], row["new"], row["reason"]) for row in csv.DictReader(lines)]
    for row in rows:
        if not row.old or not row.reason.strip():
            raise ValueError(f"{file}: a row needs an old id and a reason, got {row}")
    return rows


def compared(earlier: Sequence[str], later: Sequence[str], table: Sequence[Row]) -> Comparison:
    """Return the places of the tests of `earlier` in `later`. A row's `new` counts only if that test exists."""
    there = set(later)
    added = defaultdict(list)
    for test in there.difference(earlier):
        added[_name(test)].append(test)
    same, moved, missing = 0, {}, []
    explained: Counter[Row] = Counter()
    for test in earlier:
        if test in there:
            same += 1
        elif row := next((row for row in table if row.renamed(test) == "" or row.renamed(test) in there), None):
            explained[row] += 1
        elif len(added[_name(test)]) == 1:
            (moved[test],) = added[_name(test)]
        else:
            missing.append(test)
    return Comparison(same, moved, explained, missing, [row for row in table if row not in explained])


def collected() -> list[str]:
    """Return the ids of all tests, in pytest's order; RuntimeError if a file cannot be collected."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pytest cannot collect the tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def _name(test: str) -> str:
    return test.partition("::")[2]


def _report(found: Comparison) -> None:
    files = Counter((old.partition("::")[0], new.partition("::")[0]) for old, new in found.moved.items())
    for (old, new), tests in sorted(files.items()):
        print(f"moved {tests:5} {old} -> {new}")
    for row, tests in found.explained.items():
        print(f"table {tests:5} {row.old} -> {row.new or 'removed'}: {row.reason}")
    for row in found.unused:
        print(f"table     0 {row.old}: this row covers no test")
    for test in found.missing[:SHOWN]:
        print(f"missing     {test}")
    print(
        f"{found.same} the same, {len(found.moved)} moved, {found.explained.total()} by the table,"
        f" {len(found.missing)} missing"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `record` or `compare`; return 1 if a test is missing."""
    parser = argparse.ArgumentParser(description="Compare lists of collected tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="write the ids of all tests").add_argument("list", type=Path)
    compare = commands.add_parser("compare", help="say where the tests of a list are in another")
    compare.add_argument("earlier", type=Path)
    compare.add_argument("later", type=Path)
    compare.add_argument("--table", type=Path, default=TABLE)
    parsed = parser.parse_args(arguments)
    if parsed.command == "record":
        parsed.list.write_text("".join(f"{test}\n" for test in collected()), encoding="utf-8")
        return 0
    earlier, later = (file.read_text(encoding="utf-8").splitlines() for file in (parsed.earlier, parsed.later))
    found = compared(earlier, later, read_table(parsed.table))
    _report(found)
    return 1 if found.missing else 0


if __name__ == "__main__":
    sys.exit(main())
