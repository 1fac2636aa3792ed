"""`device_mapping` texts: the result equals Python's, although no Python is executed."""

import random

import pytest

from roll_opd.planner.device_mapping import parse_device_mapping


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,16))", tuple(range(16))),
        ("range(0,16)", tuple(range(16))),
        ("[0,1,2]", (0, 1, 2)),
        ("(0, 1)", (0, 1)),
        ("3", (3,)),
        (" list(range(0, 4)) + list(range(6, 8)) ", (0, 1, 2, 3, 6, 7)),
        ("range(0,2) + [5]", (0, 1, 5)),
        ([4, 2], (4, 2)),
        (7, (7,)),
    ],
)
def test_every_form_of_a_device_mapping_is_read(text: str | int | list[int], devices: tuple[int, ...]) -> None:
    assert parse_device_mapping(text) == devices


def test_agrees_with_python_on_random_texts() -> None:
    """Naive reference: Python itself, on texts that this test wrote."""
    draw = random.Random(0)
    for _ in range(300):
        parts, start = [], 0
        for _ in range(draw.randint(1, 4)):
            start += draw.randint(0, 3)
            stop, step = start + draw.randint(1, 9), draw.randint(1, 3)
            arguments = draw.choice([f"{start},{stop}", f" {start} , {stop}, {step}"])
            form = draw.choice(["list(range({}))", "list(range({}))", "{}"])
            literal = str(list(range(start, stop)))
            parts.append(literal if form == "{}" else form.format(arguments))
            start = stop
        text = draw.choice(["+", " + "]).join(parts)
        assert parse_device_mapping(text) == tuple(eval(text)), text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os').system('true')", "is not allowed"),
        ("list(map(int, [1]))", "is not allowed"),
        ("range(0, len([1]))", "is not allowed"),
        ("[0, 1", "cannot be read"),
        ("", "cannot be read"),
        ("range(0, 'a')", "is not allowed"),
        ("range(0, [1])", "is not a whole number"),
        ("[True]", "is not allowed"),
        ("[0] + 1", "is not a list"),
        ("range(4, 4)", "lists no device"),
        ([], "lists no device"),
        ("range(0, 4, 0)", "step other than 0"),
        ("range(0, 10**9)", "is not allowed"),
        ("range(0, 1000000000)", "more than 1000000"),
        ("[0, 1, 1]", "device 1 is listed twice"),
        ("[-1]", "device -1 is negative"),
        ([0, "1"], "'1' is not a whole number"),
        ("(" * 500 + "1" + ")" * 500, "cannot be read"),
    ],
)
def test_a_wrong_device_mapping_is_refused_with_a_sentence(text: str | list[int], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_device_mapping(text)
    assert message in str(caught.value)
