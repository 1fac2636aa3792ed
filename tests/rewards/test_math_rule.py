"""The math rule: real GSM8K answers, the ways people write answers, and text that means nothing or harm."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

from roll_opd.rewards import symbolic
from roll_opd.rewards.interface import RewardError, RewardSample
from roll_opd.rewards.math_rule import as_number, clean, final_answer, is_right, math_rule


def test_every_gsm8k_answer_is_right_and_its_neighbour_is_not(gsm8k_dir: Path) -> None:
    rows = (gsm8k_dir / "test.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(row)["answer"] for row in rows]
    assert len(solutions) == 1319
    for solution in solutions:
        truth = solution.rpartition("####")[2].strip().replace(",", "")
        neighbour = str(int(truth) + 1)
        for text in (solution, f"So the answer is {truth}.", rf"Thus $\boxed{{{truth}}}$."):
            assert is_right(text, truth), (text, truth)
            assert not is_right(text, neighbour), (text, neighbour)


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("7+9+0=16,4+8+1=13,3+5+1=9;936", "936", True),
        ("7+9+0=16,4+8+1=13,3+5+1=9;937", "936", False),
        ("7+9+0=16,4+8+1=13,3+5+1=9", "936", False),
        ("936 is wrong, it is 12", "936", False),
        ("It costs $1,234.50.", "1234.5", True),
        ("The sum is 16,4", "164", False),
        ("10-4=6", "6", True),
        ("10-4", "4", True),
        ("it is -4", "-4", True),
        ("it is -4", "4", False),
        ("about .5", "1/2", True),
        ("3/4", "0.75", True),
        ("0.333", "1/3", False),
        ("1/0", "0", False),
        ("#### 72 clips\nand 5 more", "72", True),
        ("1 2 3 #### none", "3", False),
        (r"\boxed{5} or 6", "5", True),
        (r"\boxed{5}, no: \boxed{6}", "5", False),
        (r"\boxed{} 5", "5", False),
        (r"\boxed{72\text{ clips}}", "72", True),
        (r"\boxed{50\%}", "50", True),
        (r"\boxed{12{,}500}", "12500", True),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{\frac12}", r"\boxed{\frac{2}{4}}", True),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", True),
        (r"\boxed{\sqrt{8}}", r"3\sqrt{2}", False),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        (r"\boxed{(1, 2)}", "(1,2)", True),
        (r"\boxed{(2, 1)}", "(1,2)", False),
        ("thus $2x$ is it", "x*2", True),
        ("Paris", "Paris", True),
        (r"\boxed{B}", "B", True),
        (r"\boxed{A}", "B", False),
    ],
)
def test_an_answer_is_right_or_not(response: str, truth: str, right: bool) -> None:
    assert is_right(response, truth) is right


def test_numbers_are_compared_exactly() -> None:
    rng = random.Random(0)
    for _ in range(500):
        value = Fraction(rng.randint(-(10**12), 10**12), rng.choice([1, 10, 100, 1000, 8]))
        decimal = f"{float(value):.3f}" if Fraction(f"{float(value):.3f}") == value else None
        texts = [f"{value.numerator}/{value.denominator}", *([decimal] if decimal else [])]
        assert {as_number(text) for text in texts} == {value}
    commas = f"{1234567890:,}"
    assert as_number(clean(commas)) == 1234567890
    assert is_right("x = 0.1" + "0" * 60 + "1", "0.1") is False
    assert as_number("9" * 101) is None
    assert [as_number(text) for text in ("", ".", "-", "1e5", "1_000", "٣", "1/0")] == [None] * 7


def test_any_text_is_taken() -> None:
    rng = random.Random(1)
    pieces = [
        "\\boxed{",
        "}",
        "{",
        "####",
        "$",
        "\\frac",
        "-",
        ",",
        ".",
        "/",
        "7",
        "0" * 50,
        "\n",
        "\x00",
        "\ud800",
        "é",
    ]
    texts = ["".join(rng.choices(pieces, k=rng.randint(0, 30))) for _ in range(300)]
    texts += [
        "9" * 100_000,
        "{" * 100_000,
        "\\boxed{" * 20_000,
        "1," * 50_000,
        "-" * 100_000,
        "1/" * 50_000,
        "",
    ]
    began = time.monotonic()
    for text in texts:
        final_answer(text)
        final_answer(text, numeric=False)
        is_right(text, "no number, and equal to nothing" * 40)  # too long for math-verify: the rule alone
    assert time.monotonic() - began < 10


def test_an_expression_that_never_ends_is_wrong_in_time_and_the_next_is_scored() -> None:
    began = time.monotonic()
    assert is_right(r"\boxed{9^{9^9}}", "5") is False
    assert time.monotonic() - began < symbolic.SECONDS + 10
    assert is_right(r"\boxed{\sqrt{4}}", "2") is True


def test_it_works_in_threads() -> None:
    samples = [RewardSample(str(n), rf"\boxed{{\sqrt{{{n * n}}}}}", str(n + n % 2), "t") for n in range(1, 13)]
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda sample: math_rule([sample])[0], samples))
    assert scores == math_rule(samples) == [float(n % 2 == 0) for n in range(1, 13)]


def test_a_killed_child_is_started_again() -> None:
    assert symbolic.same_expression(r"\frac{2}{4}", r"\frac12")
    process = symbolic._CHILD._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert symbolic.same_expression(r"\frac{2}{4}", r"\frac12")


def test_math_verify_that_does_not_start_is_an_error_and_not_a_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RewardError, match="pip install math-verify"):
        symbolic._Child().ask("x", "y")


def test_nothing_is_left_running_when_the_parent_is_killed() -> None:
    code = (
        "from roll_opd.rewards import symbolic; symbolic.same_expression('x', 'y');"
        "print(symbolic._CHILD._process.pid, flush=True); import time; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + symbolic.SECONDS + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    """Whether the process is there and is more than a zombie that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_missing_ground_truth_is_not_a_zero() -> None:
    assert math_rule([RewardSample("a", "5", "5", "t"), RewardSample("b", "5", None, "t")]) == [1.0, None]
