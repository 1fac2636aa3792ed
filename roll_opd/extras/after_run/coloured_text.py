"""Text of tokens in columns of a terminal, coloured by the reverse KL of each token."""

import unicodedata
from collections.abc import Sequence
from itertools import groupby, zip_longest

GAP = "   "  # between columns
RESET = "\033[0m"
# reverse KL in nats from which a colour is used -> 256-colour code of the background; as in the report
COLOURS = {0.01: 230, 0.1: 223, 0.3: 216, 1.0: 209, 3.0: 196}
LEGEND = "reverse KL from "


def colour_of(kl: float) -> int | None:
    """Return the background of a token with a reverse KL in nats; None below the first limit."""
    return next((code for limit, code in reversed(COLOURS.items()) if kl >= limit), None)


def painted(text: str, colour: int | None) -> str:
    """Return `text` with a background for a terminal."""
    return f"\033[38;5;16;48;5;{colour}m{text}{RESET}" if colour is not None and text else text


def legend() -> str:
    """Return the meaning of the colours."""
    return LEGEND + " ".join(painted(f" {limit:g} ", code) for limit, code in COLOURS.items()) + " nats"


def lines_of(pieces: Sequence[tuple[str, int | None]], width: int) -> list[tuple[str, int]]:
    """Break coloured pieces of text into lines of at most `width` columns, between words if possible.

    Returns pairs of a line with its colours, and its number of columns.
    """
    cells = [(character, colour) for text, colour in pieces for character in _visible(text)]
    lines, start = [], 0
    while start < len(cells):
        end, used, space = start, 0, None
        while end < len(cells) and cells[end][0] != "\n" and used + _width(cells[end][0]) <= width:
            used += _width(cells[end][0])
            space = end if cells[end][0] == " " else space
            end += 1
        if end < len(cells) and cells[end][0] not in ("\n", " ") and space is not None:
            end = space
        lines.append(cells[start:end])
        start = end + (end < len(cells) and cells[end][0] in ("\n", " ")) or max(end, start + 1)
    return [(_line(line), sum(_width(character) for character, _ in line)) for line in lines or [[]]]


def side_by_side(columns: Sequence[tuple[str, Sequence[tuple[str, int | None]]]], width: int) -> str:
    """Return titled columns of coloured pieces, next to each other in `width` columns of a terminal."""
    each = max(10, (width - len(GAP) * (len(columns) - 1)) // len(columns))
    blocks = []
    for title, pieces in columns:
        head = title[:each]
        blocks.append([(head, len(head)), ("-" * each, each), *lines_of(pieces, each)])
    rows = zip_longest(*blocks, fillvalue=("", 0))
    return "\n".join(GAP.join(text + " " * (each - size) for text, size in row).rstrip() for row in rows)


def _visible(text: str) -> str:
    """Return `text` without characters that would move the cursor or change colours."""
    text = text.replace("\t", "    ")
    return "".join(each if each == "\n" or each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _line(cells: Sequence[tuple[str, int | None]]) -> str:
    parts = groupby(cells, key=lambda cell: cell[1])
    return "".join(painted("".join(character for character, _ in part), colour) for colour, part in parts)
