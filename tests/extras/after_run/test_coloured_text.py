"""Columns of coloured tokens: no character is lost, no line is too wide, and colours stay with their tokens."""

import random
import re

from roll_opd.extras.after_run.coloured_text import COLOURS, RESET, colour_of, lines_of, painted, side_by_side

CODE = re.compile(r"\x1b\[[0-9;]*m")


def test_lines_have_the_text_and_fit_whatever_it_is() -> None:
    generator = random.Random(0)
    for _ in range(200):
        pieces = [
            ("".join(generator.choices("ab \n漢é", k=generator.randint(0, 9))), generator.choice([None, 230, 196]))
            for _ in range(generator.randint(0, 12))
        ]
        width = generator.randint(2, 30)
        lines = lines_of(pieces, width)
        plain = [CODE.sub("", line) for line, _ in lines]
        whole = "".join(text for text, _ in pieces)
        assert re.sub(r"[ \n]", "", "".join(plain)) == re.sub(r"[ \n]", "", whole)
        for (line, size), text in zip(lines, plain, strict=True):
            assert size == sum(2 if each == "漢" else 1 for each in text) <= width
            assert line.count("\x1b[3") == line.count(RESET)
        for _, colour in pieces:
            wanted = re.sub(r"[ \n]", "", "".join(text for text, other in pieces if other == colour))
            shown = "".join(re.findall(rf"48;5;{colour}m([^\x1b]*)", "".join(line for line, _ in lines)))
            assert colour is None or re.sub(r"[ \n]", "", shown) == wanted


def test_words_stay_whole_and_text_of_a_model_moves_no_cursor() -> None:
    assert [line for line, _ in lines_of([("one two", None), (" three", None)], 8)] == ["one two", "three"]
    assert [line for line, _ in lines_of([("a\n\nb", None)], 8)] == ["a", "", "b"]
    assert "\x1b" not in side_by_side([("t", [("\x1b[2Jx\ry", None)])], 20)


def test_colours_grow_with_the_reverse_kl() -> None:
    limits = sorted(COLOURS)
    assert colour_of(limits[0] / 2) is None
    assert [colour_of(limit) for limit in limits] == [COLOURS[limit] for limit in limits]
    assert colour_of(1e9) == COLOURS[limits[-1]] and painted("", 196) == ""


def test_columns_stand_side_by_side() -> None:
    shown = side_by_side([("left", [("aaa bbb", 196)]), ("right", [("c", None)])], 27).splitlines()
    assert [CODE.sub("", line) for line in shown] == [
        "left           right",
        "------------   ------------",
        "aaa bbb        c",
    ]
