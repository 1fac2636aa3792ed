"""Extraction of the program from an answer, and comparison of its output with the expected one."""

import random
import sys
from collections.abc import Iterator

import pytest
from sandboxes import IO, sample, values

from roll_opd.extras.graders.rewards.code_sandbox import CodeSandbox
from roll_opd.extras.graders.sandbox.cases import called_by, read_cases
from roll_opd.extras.graders.sandbox.comparison import same_output, same_value
from roll_opd.extras.graders.sandbox.response import fenced_blocks, program_of
from roll_opd.rewards.interface import RewardError, Score

sys.set_int_max_str_digits(100_000)


@pytest.fixture(scope="module")
def bare() -> Iterator[CodeSandbox]:
    """Without isolation, which this test does not need."""
    reward = CodeSandbox(unsafe=True, workers=1)
    yield reward
    reward.close()


def test_close_numbers_are_those_within_the_tolerance() -> None:
    """Against the formula |a - b| <= tolerance * max(1, |b|), over random numbers, printed and returned."""
    draw = random.Random(3)
    for _ in range(2000):
        wanted = draw.choice((1e-4, 1.0, 1e7)) * draw.uniform(-1, 1)
        found = wanted + draw.choice((1e-8, 1e-5, 1e-3, 1.0)) * draw.uniform(-1, 1)
        tolerance = 10 ** draw.uniform(-9, -2)
        close = abs(found - wanted) <= tolerance * max(1.0, abs(wanted))
        assert same_output(repr(found).encode(), repr(wanted), tolerance) is close
        assert same_value([{"a": (found, "b")}], [{"a": (wanted, "b")}], tolerance) is close


@pytest.mark.parametrize(
    ("value", "wanted", "same"),
    [
        ([0.1 + 0.2, [1]], [0.3, [1]], True),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        ([1, 2], (1, 2), False),
        (1000001, 1000000, False),
        (1000000.4, 1000000, False),
        (2.0, 2, True),
        (True, 1, True),
        (5.0, float("inf"), False),
        ("0.30000000000000004", "0.3", False),
        (None, 0.0, False),
        ([0.3], [0.3, 0.3], False),
    ],
)
def test_values_are_the_same_as_python_and_json_write_them(value: object, wanted: object, same: bool) -> None:
    assert same_value(value, wanted) is same


PROGRAM = "print(1)\n"
F = "```"
FENCES = {
    "a list item": f"1. Do:\n\n   {F}python\n   print(1)\n   {F}\n",
    "the line of a list item": f"- {F}python\n  print(1)\n  {F}\n- next",
    "a quote": f"> {F}python\n> print(1)\n> {F}\n",
    "a tab": f"1.\t{F}python\n\tprint(1)\n\t{F}",
    "three spaces": f"   {F}python\n   print(1)\n   {F}",
    "tildes": "~~~python\nprint(1)\n~~~",
    "a longer closing fence": f"{F}python\nprint(1)\n{F}``  \n",
    "line ends of Windows": f"{F}python\r\nprint(1)\r\n{F}\r\n",
    "no closing fence": f"{F}python\nprint(1)",
    "inline code before": f"use {F}python x{F}, or\n{F}python\nprint(1)\n{F}",
    "sample output behind": f"{F}python\nprint(1)\n{F}\nIt prints\n{F}\n1\n{F}\n",
    "how to run it behind": f"{F}python\nprint(1)\n{F}\n{F}bash\npython a.py\n{F}\n{F}text\nprint(2)\n{F}",
    "a session behind": f"{F}python\nprint(1)\n{F}\n{F}python\n>>> print(1)\n1\n{F}",
    "unmarked, with its output behind": f"{F}\nprint(1)\n{F}\n{F}\n1\n{F}\n{F}\n$ python a.py\n{F}",
    "a draft in thoughts": f"<think>{F}python\nprint(2)\n{F}</think>\n{F}\nprint(1)\n{F}",
    "a draft before": f"{F}python\nprint(2)\n{F}\nBetter:\n{F}python\nprint(1)\n{F}",
}


@pytest.mark.parametrize("form", FENCES)
def test_the_program_stands_in_fences_as_commonmark_has_them(form: str) -> None:
    assert program_of(FENCES[form]) == PROGRAM


def test_blocks_are_those_of_a_commonmark_parser() -> None:
    """Compared with markdown-it, for blocks outside of quotes and lists."""
    markdown_it = pytest.importorskip("markdown_it", reason="needs markdown-it-py (pip install markdown-it-py)")
    markdown = markdown_it.MarkdownIt("commonmark")
    draw = random.Random(5)
    pieces = (F, "````", "~~~", "~~~~", "   ```", "  ", "x = 1", "python", "py ", "`", "text", "\n  y\n", *"\n\n\n\n")
    for _ in range(3000):
        text = "".join(draw.choice(pieces) for _ in range(12))
        if any(line.startswith("    ") for line in text.split("\n")):
            continue  # an indented code block is no fence of a model's
        expected = [(token.info.strip(), token.content) for token in markdown.parse(text) if token.type == "fence"]
        found = [(block.info, block.code) for block in fenced_blocks(text)]
        # blank lines at the end of an unclosed block make no difference
        assert [(info, code.rstrip()) for info, code in found] == [(info, code.rstrip()) for info, code in expected]


@pytest.mark.parametrize(
    "info",
    [
        *("python", "py", "python3", "py3", "Python", "PYTHON", "python3.11", "pypy3", "Python 3", "{python}"),
        *(
            "{.python}",
            "{.python .numberLines}",
            'python title="a.py"',
            "python:a.py",
            "solution.py",
            "python linenums=1",
        ),
    ],
)
def test_code_blocks_marked_as_python_are_the_program(info: str) -> None:
    assert program_of(f"{F}{info}\nprint(1)\n{F}\n{F}\nprint(2)\n{F}") == PROGRAM


@pytest.mark.parametrize(
    "info", ["bash", "text", "output", "pycon", "python-repl", "pytb", "json", "javascript", "cython", "plaintext"]
)
def test_code_blocks_of_other_languages_are_no_program(info: str) -> None:
    assert program_of(f"{F}{info}\nprint(1)\n{F}") is None


def test_an_example_of_use_is_not_the_solution() -> None:
    solution = "def square(n):\n    return n * n\n"
    text = f"{F}python\n{solution}{F}\nUse it:\n{F}python\nprint(square(3))\n{F}"
    for cases in (
        [{"assert_code": "assert square(3) == 9"}],
        {"fn_name": "square", "inputs": [[3]], "outputs": [9]},
        [{"assert_code": "def check(f):\n    assert f(3) == 9", "entry_point": "square"}],
    ):
        assert program_of(text, called_by(read_cases({"test_cases": cases}))) == solution
    assert program_of(text, called_by(read_cases({"test_cases": IO}))) == "print(square(3))\n"
    # nor is one that has a variable of the tests' name
    text = f"{F}python\n{solution}{F}\nUse it:\n{F}python\nfound = square(3)\n{F}"
    cases = [{"assert_code": "found = square(3)\nassert found == 9"}]
    assert program_of(text, called_by(read_cases({"test_cases": cases}))) == solution


FUTURE = "from __future__ import annotations\n\ndef square(n: Unknown):\n    return n * n\n"
INHERITS = "def square(n: Unknown):\n    return math.prod([n, n])\n"
DEEP = "def depth(n):\n    return n and 1 + depth(n - 1)\nprint(depth(50000))"
IS_NINE, ZEROS = "assert square(3) == 9", "0" * 4999


@pytest.mark.parametrize(
    ("program", "cases"),
    [
        (FUTURE, [{"assert_code": IS_NINE, "import_prefix": "import math\nfrom typing import *"}]),
        (f'"""A docstring."""\n# and\n\n{FUTURE}', [{"assert_code": IS_NINE, "import_prefix": "import re"}]),
        (INHERITS, [{"assert_code": IS_NINE, "import_prefix": "from __future__ import annotations\nimport math"}]),
        ("print(2**20000)", [{"stdin": "", "expected_stdout": str(2**20000)}]),
        ("print(int('7' * 5000) % 2)", [{"stdin": "", "expected_stdout": "1"}]),
        ("def f(n): return 10**n", [{"assert_code": f"assert f(5000) == 10{ZEROS}"}]),
        ("def f(n): return n + 1", {"fn_name": "f", "inputs": [f"10{ZEROS}"], "outputs": [f"10{ZEROS[1:]}1"]}),
        ("def f(n): return [0.1 + 0.2, [n / 3]]", {"fn_name": "f", "inputs": [[1]], "outputs": [[0.3, [0.33333333]]]}),
        ("def f(n): return 0.1 + 0.2", [{"assert_code": "assert f(1) == 0.3 and f(1) in (0.3, 5)"}]),
        (DEEP, [{"stdin": "", "expected_stdout": "50000"}]),
    ],
)
def test_right_programs_pass(bare: CodeSandbox, program: str, cases: object) -> None:
    [score] = bare.score([sample("a", program, test_cases=cases)])
    assert score == Score(1.0, reason="passed")


def test_the_tolerance_is_a_key() -> None:
    cases = [{"stdin": "", "expected_stdout": "0.333"}, {"assert_code": "assert 1 / 3 == 0.333"}]
    for tolerance, expected in ((0.0, 0.0), (1e-6, 0.0), (0.01, 1.0)):
        reward = CodeSandbox(unsafe=True, workers=1, tolerance=tolerance)
        assert values(reward, sample("a", "print(1 / 3)", test_cases=cases)) == [expected]
        reward.close()
    with pytest.raises(RewardError, match="tolerance is -1"):
        CodeSandbox(unsafe=True, tolerance=-1)
