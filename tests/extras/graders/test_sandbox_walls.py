# ruff: noqa: E501 - programs are easier to read on one line
"""The sandbox against hostile programs, and its own end."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile import HOSTILE
from sandboxes import (
    ASSERTS,
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

from roll_opd.extras.graders.rewards.code_sandbox import CodeSandbox
from roll_opd.rewards.interface import Score


@pytest.fixture(scope="module")
def hostile_verdicts(rewards) -> dict[str, str]:
    """All together, as in a batch, with harmless programs among them."""
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
    """Only the idle sandboxes remain, with two processes each, and no file."""

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
@pytest.mark.parametrize("guess", GUESSES)
def test_an_assertion_against_a_literal_cannot_be_forged(rewards, guess: str) -> None:
    forms = {"assert": ASSERTS, "test": TESTS}
    samples = [sample(f"{guess} {form}", GUESSES[guess], test_cases=cases) for form, cases in forms.items()]
    assert values(rewards[False], *samples) == [0.0, 0.0]


@needs_bwrap
def test_an_assertion_without_a_literal_must_be_reached(rewards) -> None:
    cases = [{"assert_code": "import math\nassert math.isclose(f(2), 4)\nassert f(3) == 3 * 3\nassert not f(0)"}]
    programs = [SQUARE, WRONG, GUESSES["claims nothing"], "def f(x): raise SystemExit(0)"]
    assert values(rewards[False], *[sample("a", text, test_cases=cases) for text in programs]) == [1.0, 0.0, 0.0, 0.0]


@needs_bwrap
def test_what_is_expected_never_enters_the_sandbox(rewards) -> None:
    """No frame and no object of the process contains it, for an expected output and for an assertion."""
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
    known = [{"stdin": "hidden-83712", "expected_stdout": "hidden-83712"}]
    assert values(rewards[True], sample("known", "hidden = input()\n" + look, test_cases=known)) == [
        1.0
    ]  # it would find it


@needs_bwrap
def test_cases_do_not_see_each_other(rewards) -> None:
    program = (
        "import os\nprint(len(os.listdir('.')), len(os.listdir('/dev/shm')))\nopen('x', 'w').write('x'); os.mkdir('y')\n"
        "open('/dev/shm/x', 'w').write('x'); os.mkdir('/dev/shm/y'); os.chmod('/dev/shm', 0)"
    )
    assert values(rewards[True], sample("state", program, test_cases=[{"expected_stdout": "0 0"}] * 3)) == [1.0]


WORKER = """
import sys, time
from roll_opd.extras.graders.rewards.code_sandbox import CodeSandbox
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


@needs_bwrap
def test_a_program_whose_sandbox_is_killed_runs_again() -> None:
    """Idle sandboxes are killed too, and first; a program whose sandbox is killed twice while it runs is refused."""
    before = processes_of(os.getpid())
    reward = CodeSandbox(workers=2, **LIMITS)
    slow = sample("slow", "import time\ntime.sleep(3)\nprint(1)", test_cases=[{"expected_stdout": "1"}])
    try:
        with ThreadPoolExecutor(1) as caller:
            answer = caller.submit(reward.score, [slow])
            assert wait_until(lambda: len(processes_of(os.getpid()) - before) == 7)  # two each, and the program
            trees = {pid: processes_of(pid) for pid in processes_of(os.getpid()) - before}
            *waiting, running = sorted(trees.keys() - set().union(*trees.values()), key=lambda pid: len(trees[pid]))
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            os.kill(running, signal.SIGKILL)
            assert answer.result() == [Score(1.0, reason="passed")]
    finally:
        reward.close()
    assert wait_until(lambda: processes_of(os.getpid()) <= before)
