"""Show a held-out game before and after training, as text in two columns.

A run prints this text at its end.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from roll_opd.extras.report.text import visible
from roll_opd.pipelines.run_hooks import RunHook
from roll_opd.tracking.console import columns_of, shortened
from roll_opd.tracking.run_directory import VALIDATION_SAMPLES, read_jsonl

WIDTH, MAX_LINES = 35, 40  # maximum columns and lines of one game's text
MARKUP = re.compile(r"<\|[^|<>]*\|>|</?s>|<(?:start|end)_of_turn>")  # marks of chat templates around messages
ROLES = {"system", "user", "assistant", "tool", "model"}
NEEDED = {"step", "id", "reward", "prompt", "response", "token_ends", "action_mask"}
ACTION_PREFIX = "> "


class GameOfRun(RunHook):
    """Prints a held-out game at the end of a run in environments."""

    def at_end(self, ended_by: BaseException | None) -> Iterable[str]:
        """Return the game as text."""
        if ended_by or not self.plan.is_agentic:
            return ()
        return filter(None, [before_and_after(read_jsonl(self.run.path / VALIDATION_SAMPLES))])


def before_and_after(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a game as played at the first and at the last validation, in two columns.

    The game is the first one whose reward is higher at the last validation than at the first, or else the first game.
    The result is "" if no game was played at both validations.

    Args:
        rows: rows of `validation_samples.jsonl`.
    """
    students = [row for row in rows if row.get("by") == "student" and row.keys() >= NEEDED]
    if not students or any("." in str(row["id"]).rpartition("/")[2] for row in students):
        return ""  # a run of several experiences may be incomplete in these rows
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
    padded = ((left + " " * (WIDTH - columns_of(left)), right) for left, right in zip_longest(*sides, fillvalue=""))
    lines = [f"{left} | {right}".rstrip() for left, right in padded]
    return "\n".join([f"{name}, a held-out game before and after training", *lines])


def _name(row: Mapping[str, Any]) -> str:
    """Return the tag and the seed of a game.

    They are the id of the row without the draw number and the run number.
    """
    return str(row["id"]).rpartition("#")[0]


def _lines(row: Mapping[str, Any], when: str) -> list[str]:
    """Return the lines of a game: a title, the observations and the actions.

    Actions start with `ACTION_PREFIX`.
    """
    reward = "" if row["reward"] is None else f", reward {row['reward']:g}"
    lines = [*_text_lines(row["prompt"])]
    start_of_turn, acted = 0, None
    for place, acts in enumerate([*row["action_mask"], None]):
        start = row["token_ends"][place - 1] if place else 0
        if acts != acted and place:
            lines += _text_lines(row["response"][start_of_turn:start], ACTION_PREFIX if acted else "")
            start_of_turn = start
        acted = acts
    cut = lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], f"... {len(lines) - MAX_LINES + 1} lines"]
    return [f"{when}{reward}", *(shortened(line, WIDTH) for line in cut)]


def _text_lines(text: str, mark: str = "") -> list[str]:
    lines = [line.rstrip() for line in MARKUP.sub("\n", text).split("\n")]
    return [mark + visible(line) for line in lines if line and line not in ROLES]
