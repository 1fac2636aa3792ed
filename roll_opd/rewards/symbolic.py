r"""Whether two mathematical expressions are the same, by math-verify, within a limit that holds everywhere.

math-verify limits its own time with signals, which work in the main thread only and cannot interrupt one long
integer operation; `\boxed{9^{9^9}}` then hangs a run. Here it lives in one child process that
an alarm ends, and that is started again when it is next needed. The child also ends when its parent does,
because its input closes.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from roll_opd.rewards.interface import RewardError

SECONDS = 3  # for one comparison
MEMORY_BYTES = 4 << 30  # address space of the child

READY = "ready"  # the child's first line

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


def same_expression(gold: str, answer: str) -> bool:
    """Whether `answer` is mathematically `gold`; False where either cannot be read or time runs out.

    Raises `RewardError` where math-verify cannot be started at all.
    """
    return _CHILD.ask(gold, answer)


class _Child:
    """The child process, one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, gold: str, answer: str) -> bool:
        with self._lock:
            process = self._running()
            reply = _exchange(process, json.dumps([gold, answer]))
            if not reply:  # the alarm ended it
                process.wait()
                self._process = None
            return reply == "true"

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
        return self._process


def _exchange(process: "subprocess.Popen[str]", line: str) -> str:
    """Write a line, read a line; empty where the process is gone."""
    if process.stdin is None or process.stdout is None:  # never: both are pipes
        return ""
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()
    except OSError:
        return ""


def _start() -> "subprocess.Popen[str]":
    paths = [_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(
        [sys.executable, "-c", "from roll_opd.rewards.symbolic import _serve; _serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    if process.stdout is None or process.stdout.readline().strip() != READY:
        raise RewardError(
            f"math-verify could not be started (exit code {process.wait()}); check it with "
            f"`{sys.executable} -c 'import math_verify'`, install it with `pip install math-verify`"
        )
    return process


def _serve() -> None:
    """The child's whole life: read a pair, answer `true` or `false`; an alarm that nobody handles ends it."""
    import resource
    import signal

    from math_verify import parse, verify

    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard_limit == resource.RLIM_INFINITY or hard_limit > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard_limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    print(READY, flush=True)
    for line in sys.stdin:
        signal.alarm(SECONDS)
        try:
            gold, answer = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in json.loads(line))
            same = bool(gold) and bool(answer) and verify(gold, answer, timeout_seconds=None)
        except Exception:  # an expression that no comparison takes is not the answer
            same = False
        signal.alarm(0)
        print("true" if same else "false", flush=True)


_CHILD = _Child()
