"""Compare two recordings of the golden runs and print every metric, tensor and sample field that differs.

.venv/bin/python tests/goldens/compare.py A B [NAME ...] [--renamed FILE]

FILE is JSON with the new names in B of names in A: {"metrics": {"old": "new", "old/*": "new/*"}, "samples": {...},
"prompts": {...}, "weights": {...}, "added": ["metrics:new", ...], "removed": ["samples:old", ...]}.
Exit code 0: equal; 1: different; 2: not comparable.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from machine import differences
from record import MACHINE, SUFFIX
from recording import ROWS, Record, read

ABSENT = "(absent)"


@dataclass(frozen=True)
class Renamed:
    """Map of old to new names for each part, and the names ('part:name') that only one side has."""

    names: dict[str, dict[str, str]] = field(default_factory=dict)
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()

    @classmethod
    def of_file(cls, path: Path) -> "Renamed":
        found = json.loads(path.read_text())
        added, removed = (frozenset(found.pop(name, ())) for name in ("added", "removed"))
        if unknown := found.keys() - {*ROWS, "weights"}:
            raise ValueError(f"{path}: unknown {', '.join(sorted(unknown))}; write {', '.join(ROWS)}, weights")
        return cls(found, added, removed)

    def of(self, part: str, row: dict[str, Any]) -> dict[str, Any]:
        """Return `row` of A with B's names, without the removed ones."""
        kept = {name: value for name, value in row.items() if f"{part}:{name}" not in self.removed}
        return {self._new(part, name): value for name, value in kept.items()}

    def _new(self, part: str, name: str) -> str:
        names = self.names.get(part, {})
        if name in names:
            return names[name]
        for old, new in names.items():
            if old.endswith("*") and name.startswith(old[:-1]):
                return new.removesuffix("*") + name[len(old) - 1 :]
        return name


@dataclass(frozen=True)
class Difference:
    """A metric, field or tensor that differs, with the first place and the number of rows."""

    part: str
    name: str
    step: int  # of the first row that differs; weights come after all steps
    where: str
    one: Any
    other: Any
    rows: int

    def __str__(self) -> str:
        return f"{self.part} {self.name}: {self.where}: {self.one!r} -> {self.other!r} (differs {self.rows} times)"


def compared(one: Record, other: Record, renamed: Renamed) -> list[Difference]:
    """Return the differences between two records of a run, the earliest step first."""
    found = [difference for part in ROWS for difference in _rows(part, one[part], other[part], renamed)]
    return sorted([*found, *_weights(one["weights"], other["weights"], renamed)], key=lambda each: each.step)


def _rows(part: str, one: list[dict], other: list[dict], renamed: Renamed) -> Iterator[Difference]:
    """Compare rows in their order, name by name."""
    if len(one) != len(other):
        yield Difference(part, "rows", 0, "number", len(one), len(other), abs(len(one) - len(other)))
    first: dict[str, tuple] = {}
    count: dict[str, int] = {}
    for number, (row, found) in enumerate(zip(one, other, strict=False)):
        wanted = renamed.of(part, row)
        for name in dict.fromkeys([*wanted, *found]):
            if name not in wanted and f"{part}:{name}" in renamed.added:
                continue
            gap = first_gap(wanted.get(name, ABSENT), found.get(name, ABSENT))
            if gap:
                step = found.get("step", row.get("step", 0))
                first.setdefault(name, (step, f"step {step} {row.get('id', f'row {number}')}{gap[0]}", *gap[1:]))
                count[name] = count.get(name, 0) + 1
    for name, values in first.items():
        yield Difference(part, name, *values, count[name])


def _weights(one: dict[str, Any], other: dict[str, Any], renamed: Renamed) -> Iterator[Difference]:
    """Compare tensors by digest, type and shape, and report the first values of tensors that differ."""
    wanted = renamed.of("weights", one)
    for name in dict.fromkeys([*wanted, *other]):
        if name not in wanted and f"weights:{name}" in renamed.added:
            continue
        a, b = (each.get(name) for each in (wanted, other))
        if first_gap(a, b) is None:
            continue
        last = sys.maxsize
        if a is None or b is None:
            yield Difference("weights", name, last, "tensor", *("there" if each else ABSENT for each in (a, b)), 1)
            continue
        keys = ("dtype", "shape", "first", "sha256")
        key = next(key for key in keys if first_gap(a.get(key), b.get(key)))
        where, left, right = first_gap(a.get(key), b.get(key))
        yield Difference("weights", name, last, f"{key}{where}", left, right, 1)


def first_gap(one: Any, other: Any) -> tuple[str, Any, Any] | None:
    """Return the first place where two values differ, and both values there; None if they have the same bits."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(f".{key}", one.get(key, ABSENT), other.get(key, ABSENT)) for key in dict.fromkeys([*one, *other])]
    elif isinstance(one, list) and isinstance(other, list):
        both = zip_longest(one, other, fillvalue=ABSENT)
        pairs = [(f"[{number}]", *pair) for number, pair in enumerate(both)]
    else:
        return None if repr(one) == repr(other) else ("", one, other)  # repr: NaN is NaN, and -0.0 is not 0.0
    for place, left, right in pairs:
        if gap := first_gap(left, right):
            return place + gap[0], *gap[1:]
    return None


def reports(one: Path, other: Path, names: list[str], renamed: Renamed) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and report of each run; the report has only differences."""
    there = [{path.name.removesuffix(SUFFIX) for path in place.glob(f"*{SUFFIX}")} for place in (one, other)]
    for name in names or sorted(there[0] | there[1]):
        if missing := [str(place) for place, found in zip((one, other), there, strict=True) if name not in found]:
            yield name, [f"no record in {', '.join(missing)}"]
            continue
        a, b = (read(place / f"{name}{SUFFIX}") for place in (one, other))
        lines = [str(difference) for difference in compared(a, b, renamed)]
        if a["command"] != b["command"]:
            lines = [f"other command: {first_gap(a['command'], b['command'])}", *lines] if lines else []
        yield name, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("one", type=Path, metavar="A")
    parser.add_argument("other", type=Path, metavar="B")
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs; all where none is given")
    parser.add_argument("--renamed", type=Path, metavar="FILE", help="names of A and their new names in B")
    parser.add_argument("--lines", type=int, default=12, help="lines shown of a run that differs (12)")
    parsed = parser.parse_intermixed_args()
    one, other = (json.loads((place / MACHINE).read_text()) for place in (parsed.one, parsed.other))
    if gaps := differences(one, other):
        print(
            "recordings of different machines are not comparable:",
            *gaps,
            sep="\n  ",
            file=sys.stderr,
        )
        return 2
    renamed = Renamed.of_file(parsed.renamed) if parsed.renamed else Renamed()
    is_equal = True
    for name, lines in reports(parsed.one, parsed.other, parsed.names, renamed):
        print(f"{name}: {'DIFFERENT' if lines else 'equal'}")
        for line in lines[: parsed.lines]:
            print(f"  {line}")
        if len(lines) > parsed.lines:
            print(f"  and {len(lines) - parsed.lines} more")
        is_equal = is_equal and not lines
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
