"""The rule for mathematics: GSM8K answers, usual notations, meaningless text and hostile text."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from zlib import crc32

import pytest
import yaml

from roll_opd.extras.graders.mathematics import processes
from roll_opd.extras.graders.mathematics.final_answer import final_answer
from roll_opd.extras.graders.mathematics.notation import MAX_EXPRESSION, as_number, plain
from roll_opd.extras.graders.rewards.math_rule import MathRule, is_right
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score
from roll_opd.rewards.reward_registry import resolve, reward_arguments
from tests.cover import tiered

PAIRS = Path(__file__).with_name("math_pairs.txt")
PAGE = Path(__file__).parents[3] / "docs" / "rewards" / "math_rule.md"


def pairs() -> Iterator[tuple[str, str, bool]]:
    """Each gold, response and whether it is right, of the file."""
    section = ""
    for line in PAIRS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line if line in ("[boxed]", "[text]") else section
        if not line or line.startswith("# ") or line in ("[boxed]", "[text]"):
            continue
        gold, *responses = line.split(" ;; ")
        right = True
        for response in responses:
            if response == "!!":
                right = False
            elif section == "[boxed]":
                yield gold, rf"\boxed{{{response}}}", right
            else:
                yield gold, response.replace("\\n", "\n"), right


@pytest.mark.nightly
def test_answers_that_equal_a_gold_answer_and_answers_that_do_not() -> None:
    table = list(pairs())
    assert len(table) > 2000
    assert_verdicts(table)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_sample_of_the_answers_that_equal_a_gold_answer_and_of_those_that_do_not() -> None:
    """A fortieth, by a hash of the pair: the same on every day and machine."""
    assert_verdicts([pair for pair in pairs() if crc32(f"{pair[0]}\n{pair[1]}".encode()) % 40 == 0])


def assert_verdicts(table: list[tuple[str, str, bool]]) -> None:
    assert Counter(right for _, _, right in table).keys() == {True, False} and len(table) > 50
    with ThreadPoolExecutor(processes.PROCESSES) as pool:
        found = list(pool.map(lambda pair: is_right(pair[1], pair[0], timeout=60) is True, table))
    assert [pair for pair, verdict in zip(table, found, strict=True) if pair[2] is not verdict] == []


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 10])
def test_every_gsm8k_answer_is_right_and_its_neighbour_is_not(gsm8k_dir: Path, every: int) -> None:
    rows = (gsm8k_dir / "test.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(row)["answer"] for row in rows]
    assert len(solutions) == 1319
    golds = [solution.rpartition("####")[2].strip() for solution in solutions]
    triples = list(zip(solutions, golds, [*golds[1:], golds[0]], strict=True))
    for solution, gold, following in triples[::every]:
        number = int(gold.replace(",", ""))
        neighbours = {number + 1, number - 1, number * 10 + 5, int(following.replace(",", ""))} - {number}
        for text in (solution, gold, f"So the answer is ${gold}.", rf"Thus $\boxed{{{gold}}}$."):
            assert is_right(text, gold) is True, (text, gold)
            assert is_right(text, str(number)) is True, (text, number)
            for neighbour in neighbours:
                assert is_right(text, str(neighbour)) is False, (text, neighbour)


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
        ("1 2 3 #### none", "3", None),
        (r"\boxed{5} or 6", "5", True),
        (r"\boxed{5}, no: \boxed{6}", "5", False),
        (r"\boxed{} 5", "5", None),
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
def test_the_final_answer_of_a_text(response: str, truth: str, right: bool | None) -> None:
    assert is_right(response, truth) is right


def test_a_rational_number_is_itself_in_every_notation_and_no_other() -> None:
    rng = random.Random(0)
    for _ in range(300):
        value = Fraction(rng.randint(-(10**9), 10**9), rng.choice([1, 2, 7, 8, 10, 100, 1000]))
        other = value + Fraction(rng.choice([-1, 1]), rng.choice([1, 2, 10**6]))
        for one in notations(value):
            assert is_right(rf"\boxed{{{one}}}", str(value)) is True, (one, value)
            assert is_right(rf"\boxed{{{one}}}", str(other)) is False, (one, other)
    assert [as_number(text) for text in ("", ".", "-", "1e5", "1_000", "٣", "1/0", "9" * 101)] == [None] * 8


def notations(value: Fraction) -> list[str]:
    sign, (whole, rest) = "-" if value < 0 else "", divmod(abs(value.numerator), value.denominator)
    below = value.denominator
    texts = [
        f"{value}",
        rf"\frac{{{value.numerator}}}{{{below}}}",
        rf"{sign}\dfrac{{{abs(value.numerator)}}}{{{below}}}",
    ]
    if rest:
        texts += [f"{sign}{whole}\\frac{{{rest}}}{{{below}}}", f"{sign}{whole} {rest}/{below}"] if whole else []
    if 1000 % below == 0:
        decimals = f"{rest * 1000 // below:03d}"
        texts += [f"{sign}{whole}.{decimals}", f"{sign}{whole:,}.{decimals}", f"\\${sign}{whole}.{decimals}"]
    return texts


HOSTILE = {
    "tower of powers": r"\boxed{9^{9^9}}",
    "factorials": r"\boxed{100!!!!}",
    "sum": r"\boxed{\sum_{k=1}^{10^{12}} \frac{\sin(k)}{k!}}",
    "integral": r"\boxed{\int_0^1\int_0^1\int_0^1 e^{xyz}\sin(x^y)\,dx\,dy\,dz}",
    "power of a sum": r"\boxed{(x+y+z+w)^{500}-(a+b+c)^{400}}",
    "determinant": r"\boxed{\det\begin{pmatrix}"
    + r"\\".join("&".join(f"x_{{{row}{column}}}" for column in range(6)) for row in range(6))
    + r"\end{pmatrix}}",
    "binomial": r"\boxed{\binom{10^9}{5\cdot10^8}}",
    "brackets": r"\boxed{" + "[(" * 240 + "}",
    "10,000 braces": r"\boxed{" + "{" * 10_000 + "6" + "}" * 10_000 + "}",
    "parentheses": r"\boxed{" + "(" * 240 + "x" + ")" * 240 + "}",
    "letters": r"\boxed{" + "a" * 499 + "}",
    "words": r"\boxed{5 " + "ab " * 160 + "}",
    "1 MB": r"\boxed{" + "x+" * 500_000 + "}",
    "1 MB of numbers": "1," * 500_000,
    "1 MB of dollars": "$a " * 330_000,
    "1 MB of brackets": "\\[" * 500_000,
    "1 MB of marks": "the answer is " * 70_000,
    "control characters": "".join(map(chr, range(32))) * 100 + r"\boxed{\x}",
    "surrogates": "\ud800\\boxed{6\udfff}",
    "ligatures": r"\boxed{" + "ﷺ" * 300 + "}",
}  # fmt: skip


KINDS_OF_HARM = ("tower of powers", "brackets", "letters", "1 MB", "1 MB of brackets", "surrogates")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", tiered([(KINDS_OF_HARM,), (tuple(HOSTILE),)], [(KINDS_OF_HARM,)]), ids=["some", "all"]
)
def test_hostile_text_is_not_right_and_ends_in_time_and_the_next_answer_is_scored(names: tuple[str, ...]) -> None:
    rule = MathRule(timeout=0.5)
    is_right(r"\boxed{\sqrt{4}}", "3", timeout=60)  # the processes are up
    reasons = {}
    for name in names:
        text = HOSTILE[name]
        began, own = time.monotonic(), time.thread_time()
        (score,) = rule.score([RewardSample("a", text, r"2\sqrt{3}", "t")])
        assert score.value == 0.0, name
        assert time.thread_time() - own < 1, name
        assert time.monotonic() - began < 0.5 * processes.MAX_WALL_FACTOR + 1, name
        reasons[name] = score.reason
    assert {reasons[name] for name in ("tower of powers", "sum", "power of a sum") if name in names} == {"timeout"}
    assert is_right(r"\boxed{\sqrt{4}}", "2", timeout=60) is True


@pytest.mark.slow
def test_a_question_has_its_time_of_the_processor() -> None:
    process = processes._Process()
    reply, spent = process.ask("same_expression", r"2\sqrt{3}", r"\sqrt{12}", 60)
    assert reply == "true" and spent < 1
    reply, spent = process.ask("same_expression", r"2\sqrt{3}", "9^{9^9}", 0.5)
    assert reply is None and 0.5 <= spent < 0.8
    assert process.process.wait() == -signal.SIGKILL


@pytest.mark.nightly
def test_among_many_hostile_answers_at_once_the_right_ones_are_right() -> None:
    """They are queued, and their time limit starts when they run."""
    rule = MathRule(timeout=0.5)
    texts = [rf"\boxed{{9^{{9^{{{number}}}}}}}" for number in range(9, 21)]
    texts = [text for pair in zip(texts, [r"\boxed{\sqrt{12}}"] * 12, strict=True) for text in pair]

    def score(text: str) -> Score | Failure:
        return rule.score([RewardSample("a", text, r"2\sqrt{3}", "t")])[0]

    with ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(score, texts))
    assert found[1::2] == [Score(1.0, reason="right")] * 12
    assert {score.reason for score in found[::2]} <= {"timeout", "crash"}  # never a verdict that nobody reached


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
    texts += ["9" * 100_000, "{" * 100_000, "\\boxed{" * 20_000, "1," * 50_000, "-" * 100_000, "1/" * 50_000, ""]
    began = time.monotonic()
    for text in texts:
        answers = final_answer(text), final_answer(text, numeric=False)
        for answer in filter(None, answers):
            plain(answer[:MAX_EXPRESSION])
        is_right(text, "no number, and equal to nothing" * 40)  # too long for algebra: the rule alone
    assert time.monotonic() - began < 10


def test_a_score_says_why() -> None:
    samples = [RewardSample(text, text, "5", "t") for text in ("it is 5", "it is 6", "no idea")]
    samples.append(RewardSample("a", "5", None, "t"))
    assert MathRule().score(samples) == [
        Score(1.0, reason="right"),
        Score(0.0, reason="wrong"),
        Score(0.0, reason="no answer"),
        Score(None, reason="no ground truth"),
    ]


def test_a_timeout_that_is_no_time_is_refused() -> None:
    for timeout in (0, -1, "3", float("nan"), True):
        with pytest.raises(RewardError, match=r"math_rule: timeout is .*; write a number of seconds"):
            MathRule(timeout)


@pytest.mark.slow
def test_a_killed_process_is_replaced() -> None:
    pool = processes.AlgebraPool(processes=1)
    assert pool.ask("same_expression", r"\frac{2}{4}", r"\frac12", 60)
    process = pool._free.get()
    os.kill(process.process.pid, signal.SIGKILL)
    process.process.wait()
    pool._free.put(process)
    assert pool.ask("same_expression", r"\frac{2}{4}", r"\frac12", 60)


def test_math_verify_that_does_not_start_is_an_error_and_not_a_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RewardError, match="pip install math-verify"):
        processes.AlgebraPool(processes=1).ask("same_expression", "x", "y", 60)


def test_nothing_is_left_running_when_the_parent_is_killed() -> None:
    code = (
        "import threading, time\n"
        "from roll_opd.extras.graders.mathematics.processes import POOL\n"
        "POOL.ask('same_expression', 'x', 'y', 60)\n"
        "process = POOL._free.get()\n"
        "print(process.process.pid, flush=True)\n"
        "process.ask('same_expression', '9^{9^{9}}', 'y', 1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_page_of_the_worker_says_what_is_so() -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])["rewards"]["math_rule"]
    arguments = {key: value for key, value in section.items() if key in reward_arguments("math_rule")}
    assert arguments.keys() == reward_arguments("math_rule").keys()
    rule = resolve(section["worker_cls"], arguments)
    row = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    (score,) = rule([RewardSample(row["id"], r"So \boxed{\frac{3}{4}}", row["ground_truth"], row["tag"])])
    assert score == Score(1.0, reason="right")
    table = re.findall(r"^\| `(.+?)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    for gold, equal, unequal in table:
        for texts, verdict in ((equal, True), (unequal, False)):
            for text in re.findall(r"`(.+?)`", texts):
                assert is_right(rf"\boxed{{{text}}}", gold) is verdict, (gold, text)
    assert len(table) > 10
