"""Terminal output: wrapped text, tables, warnings."""

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TextIO

WIDTH = 80  # if the output is not a terminal
NARROWEST_OUTPUT, NARROWEST_COLUMN = 20, 6  # characters
GAP = "  "  # between the columns of a table
ITEM = re.compile(r" *(?:[-*] |\d+\. )")  # marker of a list item
BREAKS = re.compile(r"(?<=[/_, -])")  # positions at which a cell may be broken


def columns() -> int:
    """Return the output width: COLUMNS if set, else the terminal's width, else `WIDTH`."""
    return max(NARROWEST_OUTPUT, shutil.get_terminal_size((WIDTH, 24)).columns)


def echo(text: str, stream: TextIO | None = None) -> None:
    """Wrap `text` and print it on `stream` (default: standard output)."""
    print(wrapped(text, columns()), file=stream or sys.stdout, flush=True)


def warn(text: str) -> None:
    """Print a warning on standard error, after "warning: ". The warning is also collected for the run's record."""
    echo(f"warning: {text}", sys.stderr)


def wrapped(text: str, width: int) -> str:
    """Return `text` with long lines wrapped between words. Continuation lines are indented.

    A word that is longer than a line, such as a path, is not broken, so that users can copy it.
    """
    return "\n".join(line if len(line) <= width else _wrapped(line, width) for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    item = ITEM.match(line)
    start = item.end() if item else len(line) - len(line.lstrip()) + 2
    indent = " " * min(start, width // 2)
    return "\n".join(
        textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )


def table(rows: Sequence[Sequence[str]], width: int, indent: int = 2) -> list[str]:
    """Return the lines of a table. All `rows` must have the same number of cells.

    If the table is wider than `width`, the widest columns are made narrower, and their cells are wrapped.
    """
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = width - indent - len(GAP) * (len(sizes) - 1)
    while sum(sizes) > room and max(sizes) > NARROWEST_COLUMN:
        sizes[sizes.index(max(sizes))] -= 1
    lines = []
    for row in rows:
        cells = [_broken(cell, size) for cell, size in zip(row, sizes, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = GAP.join(part.ljust(size) for part, size in zip(parts, sizes, strict=True))
            lines.append(" " * indent + padded.rstrip())
    return lines


def _broken(cell: str, size: int) -> list[str]:
    """Return the lines of a cell, broken after separators if possible."""
    lines = [""]
    for piece in BREAKS.split(cell):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > size:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > size:
            lines[-1:] = [lines[-1][:size], lines[-1][size:]]
    return [line.rstrip() for line in lines]
