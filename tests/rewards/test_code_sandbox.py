# ruff: noqa: E501 - programs are easier to read on one line
"""The sandbox against hostile programs, honest ones, and its own end."""

import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from hostile import HOSTILE

from roll_opd.config.frozen import FrozenDict
from roll_opd.rewards.code_sandbox import CodeSandbox
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score
from roll_opd.rewards.registry import resolve
from roll_opd.rewards.sandbox.judge import same_output
from roll_opd.rewards.sandbox.response import program_of

REPOSITORY = str(Path(__file__).resolve().parents[2])
LIMITS = {"cpu_seconds": 1, "wall_seconds": 5.0, "memory_mb": 256, "processes": 8, "disk_mb": 4, "output_mb": 1}
ROLL = "roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker"


def bwrap_works() -> bool:
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(command, capture_output=True).returncode == 0


needs_bwrap = pytest.mark.skipif(
    not bwrap_works(), reason="bubblewrap is not installed, or may not make namespaces here"
)


def sample(name: str, program: str, **row: object) -> RewardSample:
    return RewardSample(name, f"So:\n```python\n{program}\n```\nThat is it.", None, "code", FrozenDict(row))


def values(reward: CodeSandbox, *samples: RewardSample) -> list[float | None]:
    return [score.value for score in reward.score(samples)]


def processes_of(pid: int) -> set[int]:
    """All that descend from `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def wait_until(holds, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


@pytest.fixture(scope="module")
def strangers() -> set[int]:
    """Descendants of this process that were here before any sandbox: what other rooms have started."""
    return processes_of(os.getpid())


@pytest.fixture(scope="module")
def rewards(strangers: set[int]) -> Iterator[dict[bool, CodeSandbox]]:
    """By `partial`. Their processes are gone after them."""
    os.environ["SECRET"] = "of the worker"
    made = {partial: CodeSandbox(partial=partial, workers=4, **LIMITS) for partial in (False, True)}
    yield made
    for reward in made.values():
        reward.close()
    del os.environ["SECRET"]
    assert wait_until(lambda: processes_of(os.getpid()) <= strangers)


@pytest.fixture(scope="module")
def hostile_verdicts(rewards) -> dict[str, str]:
    """All at once, as a batch has them, among honest ones."""
    cases = [{"stdin": "21", "expected_stdout": "42"}]
    samples = [
        sample(name, program.replace("REPOSITORY", repr(REPOSITORY)), test_cases=cases) for name, program, _ in HOSTILE
    ]
    honest = [sample(f"honest {i}", "print(2 * int(input()))", test_cases=cases) for i in range(20)]
    started = time.monotonic()
    verdicts = rewards[False].score([*samples, *honest])
    assert time.monotonic() - started < 60
    found = {item.id: verdict.reason for item, verdict in zip([*samples, *honest], verdicts, strict=True)}
    assert {verdict.value for verdict in verdicts if verdict.reason == "passed"} == {1.0}
    assert {verdict.value for verdict in verdicts if verdict.reason != "passed"} == {0.0}
    return found


@needs_bwrap
@pytest.mark.parametrize(("name", "wanted"), [(name, wanted) for name, _, wanted in HOSTILE], ids=lambda text: text)
def test_a_hostile_program_gets_its_true_verdict(hostile_verdicts, name: str, wanted: str) -> None:
    assert re.search(wanted, hostile_verdicts[name])


@needs_bwrap
def test_honest_programs_beside_hostile_ones_pass(hostile_verdicts) -> None:
    assert {hostile_verdicts[f"honest {i}"] for i in range(20)} == {"passed"}


@needs_bwrap
def test_nothing_of_a_hostile_program_stays(rewards, hostile_verdicts, strangers: set[int]) -> None:
    """What is left are the sandboxes that wait for a program: two processes each, and no file anywhere."""

    def commands() -> set[str]:
        found = set()
        for pid in processes_of(os.getpid()) - strangers:
            try:
                found.add(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-40:])
            except OSError:
                continue
        return found

    assert wait_until(lambda: len(processes_of(os.getpid()) - strangers) <= 2 * 8)
    assert all(command.endswith(" /python /work ") for command in commands()), commands()
    assert not list(Path("/tmp").glob("code_sandbox-*"))


SQUARE = "def f(x):\n    return x * x\nif __name__ == '__main__':\n    print(f(int(input())))"
IO = [{"stdin": str(i), "expected_stdout": f"{i * i}\n"} for i in range(4)]
ASSERTS = [{"assert_code": f"assert f({i}) == {i * i}"} for i in range(4)]
TESTS = [{"assert_code": "def test_one():\n    assert f(2) == 4\ndef test_two():\n    assert f(3) > 8 and 16 == f(4)"}]
CHECK = [
    {
        "assert_code": "def check(g):\n    for i in range(3):\n        assert g(i) == i * i\n    assert g(5) == 25",
        "entry_point": "f",
    }
]
WRONG = SQUARE.replace("x * x", "x + x")  # right for 0 and 2
FORMS = {
    "io": IO,
    "call": {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]},
    "call with lines of JSON": {"fn_name": "f", "inputs": ["2", "3\n"], "outputs": ["4", "9"]},
    "call with answers in lists, as APPS": {"fn_name": "f", "inputs": [[2], [3]], "outputs": [[4], [9]]},
    "columns": {"inputs": ["2", "3"], "outputs": ["4", "9"]},
    "assert": ASSERTS,
    "test": TESTS,
    "check": CHECK,
}
GUESSES = {
    "equal to all": "class E:\n    __eq__ = __gt__ = __lt__ = __req__ = lambda *a: True\ndef f(x): return E()",
    "an equal int": "class E(int):\n    __eq__ = __gt__ = __lt__ = lambda *a: True\n    __hash__ = int.__hash__\ndef f(x): return E(7)",
    "ends": "import os\ndef f(x): os._exit(0)",
    "leaves": "def f(x): raise SystemExit(0)",
    "claims": "def f(x):\n    import os, json\n    os.write(3, json.dumps({'seen': [[0, ['i', '0x7']]]}).encode())\n    os._exit(0)",
    "claims nothing": "def f(x):\n    import os, json\n    os.write(3, json.dumps({'seen': []}).encode())\n    os._exit(0)",
    "equal hashes": "def f(x):\n    import os, json\n    members = [['i', hex(i * ((1 << 61) - 1))] for i in range(110_000)]\n"
    "    text = json.dumps({'seen': [[0, ['e', members]]]}).encode()\n    while text: text = text[os.write(3, text):]\n    os._exit(0)",
    "large fractions": "def f(x):\n    import os, json\n"
    "    text = json.dumps({'seen': [[0, ['q', 'f' * 2_000_000, 'e' * 2_000_000]]]}).encode()\n"
    "    while text: text = text[os.write(3, text):]\n    os._exit(0)",
    "replaces _seen": "import builtins\nbuiltins._seen = lambda *a: None\ndef f(x):\n    globals()['_seen'] = lambda *a: None\n    return 7",
}


@needs_bwrap
@pytest.mark.parametrize("form", FORMS)
def test_right_and_wrong_answers_in_every_form(rewards, form: str) -> None:
    samples = [sample(kind, program, test_cases=FORMS[form]) for kind, program in (("right", SQUARE), ("wrong", WRONG))]
    assert [verdict.value for verdict in rewards[False].score(samples)] == [1.0, 0.0]
    share = 0.0 if form in ("test", "check") else 0.5
    assert [verdict.value for verdict in rewards[True].score(samples)] == [1.0, share]


@needs_bwrap
@pytest.mark.parametrize("guess", GUESSES)
def test_an_assertion_against_a_literal_cannot_be_forged(rewards, guess: str) -> None:
    samples = [sample(f"{guess} {form}", GUESSES[guess], test_cases=FORMS[form]) for form in ("assert", "test")]
    assert values(rewards[False], *samples) == [0.0, 0.0]


@needs_bwrap
def test_what_is_expected_never_enters_the_sandbox(rewards) -> None:
    """Neither frames nor any object of the process hold it, for an output and for an assertion."""
    look = (
        "import gc, re, sys\ndef f(x=0):\n    frame, seen = sys._getframe(), []\n"
        "    while frame: seen.append(repr(frame.f_globals) + repr(frame.f_locals)); frame = frame.f_back\n"
        "    seen += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]\n"
        "    found = re.search('hid[d]en-[0-9]+', ''.join(seen))\n    return found and found[0]\nprint(f())"
    )
    cases = [{"expected_stdout": "hidden-83712"}, {"assert_code": "assert f(1) == 'hidden-83712'"}]
    assert rewards[True].score([sample("looks", look, test_cases=cases)]) == [
        Score(0.0, {"all_passed": 0.0}, "wrong answer")
    ]
    told = [{"stdin": "hidden-83712", "expected_stdout": "hidden-83712"}]
    assert values(rewards[True], sample("told", "hidden = input()\n" + look, test_cases=told)) == [
        1.0
    ]  # it would find it


@needs_bwrap
def test_an_assertion_without_a_literal_must_be_reached(rewards) -> None:
    cases = [{"assert_code": "import math\nassert math.isclose(f(2), 4)\nassert f(3) == 3 * 3\nassert not f(0)"}]
    programs = [SQUARE, WRONG, GUESSES["claims nothing"], "def f(x): raise SystemExit(0)"]
    assert values(rewards[False], *[sample("a", text, test_cases=cases) for text in programs]) == [1.0, 0.0, 0.0, 0.0]


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
def test_a_program_whose_sandbox_is_killed_runs_again() -> None:
    """Those that wait are killed as well."""
    before = processes_of(os.getpid())
    reward = CodeSandbox(workers=2, **LIMITS)
    slow = sample("slow", "import time\ntime.sleep(1)\nprint(1)", test_cases=[{"expected_stdout": "1"}])
    with ThreadPoolExecutor(1) as caller:
        answer = caller.submit(reward.score, [slow])
        time.sleep(0.5)
        for pid in processes_of(os.getpid()) - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert answer.result() == [Score(1.0, reason="passed")]
    reward.close()
    assert wait_until(lambda: processes_of(os.getpid()) <= before)


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
    ],
)
def test_what_counts_as_the_same_output(output: bytes, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


def test_a_response_is_read_in_linear_time() -> None:
    started = time.monotonic()
    for text in ("```" + "a" * 3_000_000 + "`", "```" + " " * 3_000_000 + "`\n", "```\n" * 600_000, " " * 3_000_000):
        program_of(text)
    assert time.monotonic() - started < 5


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


@needs_bwrap
@pytest.mark.parametrize(
    "cases", [None, [], "{", [3], [{"stdin": "1"}], [{"assert_code": "assert ("}], {"inputs": [1], "outputs": []}]
)
def test_a_row_without_usable_cases_has_no_reward(rewards, cases: object) -> None:
    verdict = rewards[False].score([sample("bad", "print(1)", test_cases=cases)])[0]
    assert verdict.value is None and verdict.reason == "unusable test cases"


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
        "collections.Counter('aab') == {'a': 2, 'b': 1}",
        "10 ** 5000 > 7",
        "fractions.Fraction(1, 2) == 0.5",
        "-1 == -1",
    ]
    wrong = ["[1] == (1,)", "True is 1", "'1' == 1", "float('nan') == 1.0", "1 is True"]
    for row, reward in ((pairs, 1.0), (wrong, 0.0)):
        cases = [{"assert_code": "import collections, fractions\nassert " + code} for code in row]
        assert values(rewards[True], sample("values", "pass", test_cases=cases)) == [reward]


@needs_bwrap
def test_cases_do_not_see_each_other(rewards) -> None:
    program = (
        "import os\nprint(len(os.listdir('.')), len(os.listdir('/dev/shm')))\nopen('x', 'w').write('x'); os.mkdir('y')\n"
        "open('/dev/shm/x', 'w').write('x'); os.mkdir('/dev/shm/y'); os.chmod('/dev/shm', 0)"
    )
    assert values(rewards[True], sample("state", program, test_cases=[{"expected_stdout": "0 0"}] * 3)) == [1.0]


WORKER = """
import sys, time
from roll_opd.rewards.code_sandbox import CodeSandbox
from roll_opd.rewards.interface import RewardSample
reward = CodeSandbox(workers=1, wall_seconds=60.0, cpu_seconds=60, unsafe=sys.argv[1] == "unsafe")
print("ready", flush=True)
program = "import os, time\\nos.fork()\\nos.setsid() if os.getpid() != os.getsid(0) else 0\\ntime.sleep(60)"
reward.score([RewardSample("a", "```python\\n" + program + "\\n```", None, "code", {"test_cases": [{"expected_stdout": "1"}]})])
"""


@needs_bwrap
@pytest.mark.parametrize("mode", ["isolated", "unsafe"])
def test_nothing_stays_of_a_worker_that_is_killed(mode: str) -> None:
    environment = {**os.environ, "PYTHONPATH": REPOSITORY}
    worker = subprocess.Popen([sys.executable, "-c", WORKER, mode], stdout=subprocess.PIPE, env=environment)
    assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
    expected = 6 if mode == "isolated" else 4  # a sandbox that waits, one that runs, a program and its child
    assert wait_until(lambda: len(processes_of(worker.pid)) >= expected)
    started = processes_of(worker.pid)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    assert wait_until(lambda: not list(Path("/tmp").glob("code_sandbox-*")))


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
