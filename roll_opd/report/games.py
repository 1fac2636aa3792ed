"""A held-out game before and after training, side by side: what a run in environments ends with."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from roll_opd.report.text import visible

WIDTH, MOST_LINES = 35, 40  # of one side, in columns of a terminal and in lines
WIDE, NO_WIDTH = {"W", "F"}, {"Mn", "Me"}  # two columns: Chinese, Japanese, emoji; none: accents by themselves
MARKUP = re.compile(r"<\|[^|<>]*\|>|</?s>|<(?:start|end)_of_turn>")  # what chat templates write around messages
ROLES = {"system", "user", "assistant", "tool", "model"}
NEEDED = {"step", "id", "reward", "prompt", "response", "token_ends", "action_mask"}
ACTS = "> "  # before what the model did


def before_and_after(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a game twice, as lines, from the rows of `validation_samples.jsonl`; "" where none was played twice.

    It is the first one of which more came at the last validation than at the first, else the first one.
    """
    students = [row for row in rows if row.get("by") == "student" and row.keys() >= NEEDED]
    if not students or any("." in str(row["id"]).rpartition("/")[2] for row in students):
        return ""  # a run of several experiences, of which these rows may lack some
    last_step = max(row["step"] for row in students)
    first_step = min(row["step"] for row in students)
    before = {_name(row): row for row in reversed(students) if row["step"] == first_step}
    after = {_name(row): row for row in reversed(students) if row["step"] == last_step}
    both = [name for name in map(_name, students) if name in before and name in after]
    if first_step == last_step or not both:
        return ""
    better = (name for name in both if (after[name]["reward"] or 0) > (before[name]["reward"] or 0))
    name = next(better, both[0])
    sides = [_lines(one[name], f"step {step}") for one, step in ((before, first_step), (after, last_step))]
    padded = ((left + " " * (WIDTH - _columns(left)), right) for left, right in zip_longest(*sides, fillvalue=""))
    lines = [f"{left} | {right}".rstrip() for left, right in padded]
    return "\n".join([f"{name}, a held-out game before and after", *lines])


def _name(row: Mapping[str, Any]) -> str:
    """Return the tag and the seed of a game: its id without the numbers of draw and run."""
    return str(row["id"]).rpartition("#")[0]


def _lines(row: Mapping[str, Any], when: str) -> list[str]:
    """Return one side: what was told, and behind a mark what the model did."""
    reward = "" if row["reward"] is None else f", reward {row['reward']:g}"
    lines = [*_said(row["prompt"])]
    begun, acted = 0, None
    for place, acts in enumerate([*row["action_mask"], None]):
        start = row["token_ends"][place - 1] if place else 0
        if acts != acted and place:
            lines += _said(row["response"][begun:start], ACTS if acted else "")
            begun = start
        acted = acts
    cut = lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], f"... {len(lines) - MOST_LINES + 1} lines"]
    return [f"{when}{reward}", *map(_cut, cut)]


def _said(text: str, mark: str = "") -> list[str]:
    lines = [line.rstrip() for line in MARKUP.sub("\n", text).split("\n")]
    return [mark + visible(line) for line in lines if line and line not in ROLES]


def _columns(text: str) -> int:
    """Return how many columns of a terminal `text` takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in WIDE for character in text)
    return len(text) + wide - sum(unicodedata.category(character) in NO_WIDTH for character in text)


def _cut(line: str) -> str:
    """Return `line`, or what of it fits beside three dots."""
    if _columns(line) <= WIDTH:
        return line
    while _columns(line) > WIDTH - 3:
        line = line[:-1]
    return f"{line}..."
