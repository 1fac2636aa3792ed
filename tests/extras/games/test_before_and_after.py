"""The game at the end of a run in environments."""

from typing import Any

import pytest

from roll_opd.extras.games.before_and_after import before_and_after


def row(step: int, seed: int, reward: float | None, turns: list[str], by: str = "student") -> dict[str, Any]:
    """A game with alternating observations and actions; one token per character."""
    response = "".join(turns)
    mask = [place % 2 == 0 for place, turn in enumerate(turns) for _ in turn]
    ends = list(range(1, len(response) + 1))
    prompt = "<|im_start|>user\nP_G<|im_end|>\n<|im_start|>assistant\n"
    reported = {"prompt": prompt, "response": response, "action_mask": mask, "token_ends": ends}
    return {"step": step, "by": by, "id": f"Lake/{seed}#7/0", "reward": reward, **reported}


def test_the_first_game_that_went_better_is_shown_twice() -> None:
    lost = ["Left<|im_end|>", "\n<|im_start|>user\nP_G<|im_end|>\n<|im_start|>assistant\n", "Up\x1b[31m"]
    rows = [
        row(0, 1, 0.0, lost),
        row(0, 2, 0.0, lost),
        row(5, 1, 0.5, ["Left"], by="teacher/one"),
        row(5, 2, 0.0, lost),
        row(10, 1, 0.0, lost),
        row(10, 2, 1.0, ["Right"]),
    ]
    lines = [[side.strip() for side in line.split("|")] for line in before_and_after(rows).split("\n")]
    assert lines == [
        ["Lake/2, a held-out game before and after training"],
        ["step 0, reward 0", "step 10, reward 1"],
        ["P_G", "P_G"],
        ["> Left", "> Right"],
        ["P_G", ""],
        ["> Up⟨U+001B⟩[31m", ""],
    ]


def test_a_game_played_once_is_not_shown() -> None:
    assert before_and_after([]) == ""
    assert before_and_after([row(0, 1, 0.0, ["Left"])]) == ""
    assert before_and_after([row(0, 1, 0.0, ["Left"]), row(2, 9, 0.0, ["Left"])]) == ""
    older = {"step": 0, "by": "student", "id": "Lake/1#7/0"}
    assert before_and_after([older, row(2, 1, 0.0, ["Left"])]) == ""


def test_games_of_several_experiences_are_not_shown() -> None:
    rows = [row(0, 1, 0.0, ["Left"]), row(2, 1, 1.0, ["Left"]), row(2, 1, 1.0, ["Up"]) | {"id": "Lake/1#7/0.1"}]
    assert before_and_after(rows) == ""


def test_long_games_and_lines_are_cut() -> None:
    rows = [row(step, 1, None, ["\n".join(["x" * 99] * 60)]) for step in (0, 1)]
    lines = before_and_after(rows).split("\n")
    assert len(lines) == 42 and all(len(line) < 80 for line in lines)
    assert lines[1] == f"{'step 0':<35} | step 1" and lines[-1].endswith("... 22 lines")


@pytest.mark.parametrize(
    ("said", "columns"), [("你好", 4), ("√ 🎮", 4), ("a\u0301", 1), ("ﾊ", 1), ("向右走" * 6 + "x", 37), ("字" * 16, 32)]
)
def test_wide_characters_keep_the_other_column_aligned(said: str, columns: int) -> None:
    """Chinese and emoji take two columns of a terminal, an accent by itself none; a root and half-width kana one."""
    line = before_and_after([row(0, 1, 0.0, [said]), row(1, 1, 1.0, [said])]).split("\n")[3]
    left, right = line.split(" | ")
    if columns + 2 <= 35:  # after the mark of an action
        assert right == f"> {said}" and left == right + " " * (35 - 2 - columns)
    else:
        assert right == f"> {'向右走' * 5}向…" and left == right
