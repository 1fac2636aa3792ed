"""Programs with the test cases of their rows, in every form, and the reward's start and limits."""

import base64
import inspect
import json
import os
import pickle
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from sandboxes import (
    ASSERTS,
    IO,
    LIMITS,
    REPOSITORY,
    SQUARE,
    TESTS,
    WRONG,
    needs_bwrap,
    processes_of,
    sample,
    values,
    wait_until,
)

from roll_opd.base.frozen import FrozenDict
from roll_opd.extras.graders.rewards.code_sandbox import CodeSandbox
from roll_opd.extras.graders.sandbox.comparison import same_output
from roll_opd.extras.graders.sandbox.response import program_of
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score
from roll_opd.rewards.reward_registry import resolve

ROLL = "roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker"


CHECK = [
    {
        "assert_code": "def check(g):\n    for i in range(3):\n        assert g(i) == i * i\n    assert g(5) == 25",
        "entry_point": "f",
    }
]


FORMS = {
    "io": IO,
    "call": {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]},
    "call with lines of JSON": {"fn_name": "f", "inputs": ["2", "3\n"], "outputs": ["4", "9"]},
    "call with answers in lists, as APPS": {"fn_name": "f", "inputs": [[2], [3]], "outputs": [[4], [9]]},
    "functional, as LiveCodeBench": [
        {"input": "2", "output": "4", "testtype": "functional", "metadata": '{"func_name": "f"}'},
        {"input": "3", "output": "9", "testtype": "functional", "metadata": {"func_name": "Solution.f"}},
    ],
    "arguments by name": [
        {"type": "function_call", "fn_name": "f", "input": f"x = {x}", "output": y} for x, y in ((2, "4"), (3, "9"))
    ],
    "columns": {"inputs": ["2", "3"], "outputs": ["4", "9"]},
    "assert": ASSERTS,
    "test": TESTS,
    "check": CHECK,
}


@needs_bwrap
@pytest.mark.parametrize("form", FORMS)
def test_right_and_wrong_answers_in_every_form(rewards, form: str) -> None:
    samples = [sample(kind, program, test_cases=FORMS[form]) for kind, program in (("right", SQUARE), ("wrong", WRONG))]
    assert [verdict.value for verdict in rewards[False].score(samples)] == [1.0, 0.0]
    share = 0.0 if form in ("test", "check") else 0.5
    assert [verdict.value for verdict in rewards[True].score(samples)] == [1.0, share]


@needs_bwrap
def test_a_method_of_solution_is_called_and_tuples_are_lists(rewards) -> None:
    program = "class Solution:\n    def pairs(self, items: List[int], by: Dict[str, int]):\n        return ANSWER"
    cases = json.dumps({"inputs": [[[1, 2], {"a": 3}]], "outputs": [[[1, 4], [2, 5]]], "fn_name": "pairs"})
    answers = ["tuple((n, n + by['a']) for n in items)", "[(n, n) for n in items]", "float('nan')", "{1, 2}", "exit"]
    samples = [sample(text, program.replace("ANSWER", text), test_cases=cases) for text in answers]
    assert values(rewards[False], *samples) == [1.0, 0.0, 0.0, 0.0, 0.0]


@needs_bwrap
def test_cases_about_text_read_the_answer_and_run_none_of_it(rewards) -> None:
    cases = ["assert len({response}.split()) == 3", {"assert_code": "assert {response}.startswith('one')"}]
    row = FrozenDict({"test_cases": cases, "case_type": "text"})
    texts = ["<think>so</think> one two three", "one two", "one'''+exit(0)+''' two three", "'''\nraise SystemExit(0)#"]
    samples = [RewardSample(text, text, None, "code", row) for text in texts]
    assert values(rewards[False], *samples) == [1.0, 0.0, 1.0, 0.0]


@needs_bwrap
def test_packages_can_be_imported_on_request(rewards) -> None:
    cases = [{"expected_stdout": "1.10"}]
    program = "from packaging.version import Version\nprint(max(Version('1.9'), Version('1.10')))"
    reward = CodeSandbox(packages=["packaging"], workers=1, **LIMITS)
    assert values(reward, sample("with", program, test_cases=cases)) == [1.0]
    assert values(reward, sample("no others", "import pytest\nprint('1.10')", test_cases=cases)) == [0.0]
    reward.close()
    assert values(rewards[False], sample("without", program, test_cases=cases)) == [0.0]
    with pytest.raises(RewardError, match="packages: no-such-thing is not installed"):
        CodeSandbox(packages=["no-such-thing"])


@needs_bwrap
def test_the_page_is_true() -> None:
    """Its YAML makes a worker with the documented defaults, and its rows work."""
    page = (Path(REPOSITORY) / "docs/rewards/code_sandbox.md").read_text()
    section = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])["rewards"]["code"]
    arguments = {key: value for key, value in section.items() if key not in ("worker_cls", "tag_included")}
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    defaults = {name: item.default for name, item in inspect.signature(CodeSandbox).parameters.items()}
    assert set(documented) == set(defaults)
    for name, default in documented.items():
        if name not in ("workers", "packages"):
            assert yaml.safe_load(default) == defaults[name], name
    score = resolve(section["worker_cls"], {**arguments, "workers": 1})
    rows = [json.loads(line) for line in re.search(r"```json\n(.*?)```", page, re.DOTALL)[1].splitlines()]
    programs = ["print(int(input()) ** 2)", "def square(n): return n * n", "def square(n): return n * n"]
    for row, program in zip(rows, programs, strict=True):
        right, half = score(
            [sample("a", text, **row) for text in (program, program.replace("** 2", "* 3").replace("n * n", "n * 3"))]
        )
        assert (right.value, half.value) == (1.0, 0.5)
    score.__self__.close()


@needs_bwrap
def test_workers_hold_over_all_calls() -> None:
    reward = CodeSandbox(workers=2, **LIMITS)
    sleeps = sample("sleeps", "import time\ntime.sleep(0.4)\nprint(1)", test_cases=[{"expected_stdout": "1"}])
    started = time.monotonic()
    with ThreadPoolExecutor(6) as callers:
        assert list(callers.map(lambda _: values(reward, sleeps), range(6))) == [[1.0]] * 6
    assert time.monotonic() - started > 3 * 0.4
    reward.close()


@needs_bwrap
def test_where_sandboxes_stop_starting_samples_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = CodeSandbox(workers=1, **LIMITS)
    breaks = tmp_path / "bwrap"
    breaks.write_text("#!/bin/sh\necho 'no space left' >&2\nexit 1\n")
    breaks.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = [sample(str(number), SQUARE, test_cases=IO) for number in range(3)]
    scores = [reward.score([item])[0] for item in asked]
    assert isinstance(scores[-1], Failure) and scores[-1].kind == "sandbox" and "no space left" in scores[-1].message
    monkeypatch.undo()
    assert wait_until(lambda: reward.score(asked[:1]) == [Score(1.0, reason="passed")])
    assert values(reward, *asked) == [1.0] * 3
    reward.close()


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        (b" 1  2 \n3\n\n", "1 2\n3", True),
        (b"1.50 2", "1.5 2.0", True),
        (b"1.5", "1.51", False),
        (b"007", "7", False),
        (b"1\n2", "1 2", False),
        (b"42\x00\xff", "42", False),
        (b"", "", True),
        (b"nan", "nan", True),
        (b"0.3333333333333333", "0.333333333333", True),
        (b"0.30000000000000004 1e-7", "0.3 0.0000001", True),
        (b"[0.30000000000000004,", "[0.3,", True),
        (b"x=0.34", "x=0.33", False),
        (b"0.10001", "0.1", False),
        (b"3.0000000000000004", "3", True),
        (b"1000000.4", "1000000", False),
        (b"1000001", "1000000", False),
        (b"9" * 5000, "9" * 4999 + "8", False),
        (b"9" * 5000 + b".0", "9" * 5000, True),
        (b"inf -inf NaN", "Infinity -inf nan", True),
        (b"-inf", "inf", False),
        (b"1e999", "1e998", False),
        (b"1.2.3 v1.20", "1.2.30 v1.2", False),
        (b"YES", "Yes", False),
    ],
)
def test_what_counts_as_the_same_output(output: bytes, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


def test_a_response_is_read_in_linear_time() -> None:
    started = time.process_time()
    for text in ("```" + "a" * 3_000_000 + "`", "```" + " " * 3_000_000 + "`\n", "```\n" * 600_000, " " * 3_000_000):
        program_of(text)
    assert time.process_time() - started < 5


@needs_bwrap
def test_the_program_is_the_last_python_block_and_rows_may_be_json(rewards) -> None:
    cases = '[{"stdin": "", "expected_stdout": "1 2\\n3"}]'
    right, wrong = "```python\nprint('1   2 \\n3\\n')\n```", "```python\nprint(1)\n```"
    texts = [wrong + right, right + wrong, right + "\n```text\nno program\n```", "print(1)", f"{right}</think>nothing"]
    samples = [
        RewardSample("a", text.replace("```p", "\n```p"), None, "code", FrozenDict({"test_cases": cases}))
        for text in texts
    ]
    found = rewards[False].score(samples)
    assert [verdict.value for verdict in found] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert [verdict.reason for verdict in found[3:]] == ["no code", "no code"]


PUBLIC = [{"input": "2", "output": "4", "testtype": "functional"}]
PRIVATE = [{"input": "3", "output": "9", "testtype": "functional"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(PRIVATE)))).decode()
HOSTILE = base64.b64encode(zlib.compress(pickle.dumps(os.getcwd))).decode()
FUNC = '{"func_name": "f"}'
STARTER = "class Solution:\n    def f(self, x: int) -> int:\n        "


@needs_bwrap
def test_public_data_sets_are_read_as_they_are_written(rewards) -> None:
    rows = {
        "LiveCodeBench": {
            "public_test_cases": json.dumps(PUBLIC),
            "private_test_cases": PACKED,
            "metadata": FUNC,
        },
        "LiveCodeBench, name in its starter code": {"test_cases": PUBLIC + PRIVATE, "starter_code": STARTER},
        "LeetCodeDataset": {
            "input_output": [{"input": f"x = {x}", "output": str(x * x)} for x in (2, 3)],
            "entry_point": "Solution().f",
        },
        "MBPP": {"test_list": ["assert f(2) == n", "assert f(3) == 9"], "test_setup_code": "n = 4", "test_imports": []},
        "HumanEval": {"test": "def check(g):\n    assert g(2) == 4\n    assert g(3) == 9", "entry_point": "f"},
        "a truth value as Python writes it": {
            "test_cases": [{"input": "2, 4", "output": "True"}],
            "fn_name": "same",
        },
    }
    method = SQUARE.replace("def f(", "def same(x, y):\n    return x * x == y\ndef f(")
    answers = [sample(name, method, **row) for name, row in rows.items()]
    assert [verdict.value for verdict in rewards[False].score(answers)] == [1.0] * len(rows)
    wrong = [sample(name, method.replace("x * x", "x + x"), **row) for name, row in rows.items()]
    assert [verdict.value for verdict in rewards[False].score(wrong)][:-1] == [0.0] * (len(rows) - 1)


@needs_bwrap
def test_a_case_that_cannot_be_read_is_no_failure(rewards) -> None:
    rows = [
        {"test_cases": PUBLIC},  # no name of the function
        {"test_cases": PUBLIC, "starter_code": "def f(x): ...\ndef g(x): ..."},
        {"test_cases": [{"input": "2", "output": "4", "testtype": "interactive"}]},
        {"test_cases": [{"input": "a b", "output": "4"}], "fn_name": "f"},
        {"test_cases": [{"input": [[2]], "output": "4"}]},  # arguments without a function
        {"test_cases": ["f(2) == 4"]},
        {"public_test_cases": HOSTILE, "metadata": FUNC},
        {"public_test_cases": PACKED[:-8], "metadata": FUNC},
    ]
    found = rewards[False].score([sample(str(row), SQUARE, **row) for row in rows])
    assert {(verdict.value, verdict.reason) for verdict in found} == {(None, "unusable test cases")}


UNCALLED = (
    "class TestSquare:\n    def test_two(self):\n        assert f(2) == 4",
    "from unittest import *\nclass T(TestCase):\n    def test_two(self):\n        self.assertEqual(f(2), 4)\nmain()",
    "async def test_two():\n    assert f(2) == 4",
)


@needs_bwrap
@pytest.mark.parametrize(
    "cases",
    [None, [], "{", [3], [{"stdin": "1"}], [{"assert_code": "assert ("}], {"inputs": [1], "outputs": []}]
    + [[{"assert_code": code}] for code in UNCALLED],
)
def test_a_row_without_usable_cases_has_no_reward(rewards, cases: object) -> None:
    verdict = rewards[False].score([sample("bad", "print(1)", test_cases=cases)])[0]
    assert verdict.value is None and verdict.reason == "unusable test cases"


@needs_bwrap
def test_a_case_without_a_reached_assertion_is_not_passed(rewards) -> None:
    def value(program: str, code: str) -> float:
        return values(rewards[True], sample("reached", program, test_cases=[{"assert_code": code}]))[0]

    raises = "try:\n    f(0)\n    assert False\nexcept ValueError:\n    pass"
    assert value("def f(x): raise ValueError", raises) == 1.0
    assert value("def f(x): return x", raises) == 0.0
    loop = "for x in range(2):\n    assert f(x) == 0"
    assert value("def f(x): return 0", loop) == 1.0
    assert value("range = lambda count: []", loop) == 0.0
    both = "assert f(0) == 0\nfor n, x in enumerate(range(1, 3)):\n    assert f(x) == n + 1"
    assert value("def f(x): return x", both) == 1.0
    assert value("def f(x): return 0\nrange = enumerate = lambda *counts: []", both) == 0.0
    some = (
        "for x in range(3):\n    if x == 0:\n        continue\n    assert f(x) == x\nfor x in []:\n    assert f(x) == 7"
    )
    assert value("def f(x): return x", some) == 1.0
    assert (
        value("def f(x): return 1", "def main():\n    assert f(0) == 0\nif __name__ == '__main__':\n    main()") == 0.0
    )
    called = "class T:\n    def test_zero(self):\n        assert f(0) == 0\nT().test_zero()"
    assert value("def f(x): return 0", called) == 1.0
    assert value("def f(x): return 1", called) == 0.0


@needs_bwrap
def test_a_case_learns_nothing_of_the_one_before(rewards) -> None:
    program = """
import os
for place in ("/work", "/dev/shm"):
    status = os.stat(place)
    if 42 in (status.st_mtime, status.st_atime) or os.listdir(place) or os.listxattr(place):
        print("seen")
        break
    try:
        os.setxattr(place, "user.seen", b"1")
    except OSError:
        pass
    open(place + "/seen", "w").close()
    os.utime(place, (42, 42))
"""
    cases = [{"stdin": "", "expected_stdout": ""}] * 2
    assert values(rewards[True], sample("memory", program, test_cases=cases)) == [1.0]


@needs_bwrap
def test_values_that_compare_equal_in_python_are_equal(rewards) -> None:
    pairs = [
        "1 == 1.0",
        "[1, (2, 'é')] == [1, (2, 'é')]",
        "{1: {2, 3}} == {1: {3, 2}}",
        "None is None",
        "b'x' in [b'x']",
        "0.1 + 0.2 != 0.3",
    ]
    pairs += [
        "enum.Enum('E', {'A': 'a'}, type=str).A == 'a'",
        "collections.Counter('aab') == {'a': 2, 'b': 1}",
        "10 ** 5000 > 7",
        "fractions.Fraction(1, 2) == 0.5",
        "-1 == -1",
    ]
    wrong = ["[1] == (1,)", "True is 1", "'1' == 1", "float('nan') == 1.0", "1 is True"]
    for row, reward in ((pairs, 1.0), (wrong, 0.0)):
        cases = [{"assert_code": "import collections, enum, fractions\nassert " + code} for code in row]
        assert values(rewards[True], sample("values", "pass", test_cases=cases)) == [reward]


def test_without_bubblewrap_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RewardError, match=r"bwrap\) is not installed; install it \(`apt-get install bubblewrap`"):
        resolve("code_sandbox")


def test_where_namespaces_are_forbidden_it_says_what_to_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = tmp_path / "bwrap"
    refuses.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RewardError, match=r"No permissions to create new namespace.*kernel.unprivileged_userns_clone"):
        resolve(ROLL)


def test_unsafe_works_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    before = processes_of(os.getpid())
    reward = CodeSandbox(unsafe=True, workers=1)
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint(9)"
    samples = [sample("a", SQUARE, test_cases=IO), sample("b", daemon, test_cases=[{"expected_stdout": "9"}])]
    assert values(reward, *samples) == [1.0, 1.0]
    reward.close()
    assert "UNSAFE" in capsys.readouterr().err
    assert wait_until(lambda: processes_of(os.getpid()) <= before)


@pytest.mark.parametrize(
    ("key", "value"), [("memory_mb", 0), ("wall_seconds", "long"), ("partial", 1), ("workers", 0), ("cpu_seconds", 1.5)]
)
def test_arguments_are_checked(key: str, value: object) -> None:
    with pytest.raises(RewardError, match=f"code_sandbox: {key} is {value!r}"):
        resolve("code_sandbox", {key: value})
