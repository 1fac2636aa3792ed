r"""Process pool for module `algebra`, with a hard CPU-time limit per question.

math-verify limits its time with signals. They work in the main thread only, and they cannot interrupt one long integer
operation, so `\boxed{9^{9^9}}` would hang a run. Here a process that exceeds the limit is killed and replaced. The
limit is CPU time, so that a verdict does not depend on the load of the machine.

The first question starts a process, and up to `PROCESSES` processes run. A process ends when its input closes, at the
latest at the end of the parent process. If it is busy at that time, an alarm ends it.
"""

import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from roll_opd.extras.graders.mathematics.equality import Question
from roll_opd.rewards.interface import RewardError

PROCESSES = 8
PATIENCE = 60  # seconds that a question waits for a free process, before its own time starts
START_SECONDS = 120  # timeout of starting the first process
MAX_WALL_FACTOR = 20  # limit on the wall time of a question, as a multiple of the CPU limit
MEMORY_BYTES = 1 << 30  # address space of a process

READY = "ready"  # a process's first line

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[4])


class TimedOut(Exception):
    """The questions about a pair of answers took more CPU time than allowed."""


class Crashed(Exception):
    """The question made two processes crash, one after the other."""


class Busy(Exception):
    """No process became free within `PATIENCE` seconds."""


class TimedAlgebra:
    """Implementation of `equality.Algebra` for one pair of answers.

    Args:
        seconds: CPU seconds for all questions about the pair together.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def __call__(self, question: Question, gold: str, answer: str) -> bool:
        """Return the answer of the function `question` of module `algebra`. Raises `TimedOut`, `Crashed` or `Busy`."""
        if self._left <= 0:
            raise TimedOut
        same, spent = POOL.ask(question, gold, answer, self._left)
        self._left -= spent
        return same


class _Process:
    """A process that answers one question at a time.

    Raises `RewardError` if math-verify cannot be started.
    """

    def __init__(self) -> None:
        paths = [_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from roll_opd.extras.graders.mathematics.processes import _serve; _serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        if self._line(None) != READY:
            raise RewardError(
                f"math-verify could not be started (exit code {self.process.wait()}); check it with "
                f"`{sys.executable} -c 'import math_verify'`, install it with `pip install math-verify`"
            )

    def ask(self, question: Question, gold: str, answer: str, seconds: float) -> tuple[str | None, float]:
        """Return (reply, CPU seconds).

        The reply is empty if the process died. It is None if the process was killed because it exceeded its time.

        Args:
            question: name of the function of `algebra` that compares the two answers.
            seconds: limit on the CPU time.
        """
        assert self.process.stdin is not None
        before = self._processor_seconds()
        try:
            self.process.stdin.write(json.dumps([question, gold, answer, seconds]).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            return "", 0.0
        began = time.monotonic()
        spent = 0.0
        while (reply := self._line(seconds - spent)) is None:
            spent = self._processor_seconds() - before
            if spent >= seconds or time.monotonic() - began >= MAX_WALL_FACTOR * seconds:
                break
        if not reply:
            self.process.kill()
            self.process.communicate()
            return reply, spent
        return reply, self._processor_seconds() - before

    def _processor_seconds(self) -> float:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:  # the process has ended
            return 0.0
        return times.user + times.system

    def _line(self, seconds: float | None) -> str | None:
        assert self.process.stdout is not None
        ready = select.poll()
        ready.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        if not ready.poll(None if seconds is None else max(1, seconds * 1000)):
            return None
        return self.process.stdout.readline().decode().strip()


class AlgebraPool:
    """Thread-safe pool of at most `processes` processes."""

    def __init__(self, processes: int = PROCESSES) -> None:
        self._free: queue.LifoQueue[_Process | RewardError] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._room = self._processes = processes
        self._tried = threading.Event()  # the first process has started or failed

    def start(self) -> None:
        """Start a process in the background; do nothing if the pool is full."""
        with self._lock:
            if self._room == 0:
                return
            self._room -= 1
        threading.Thread(target=self._add, daemon=True).start()

    def ask(self, question: Question, gold: str, answer: str, seconds: float) -> tuple[bool, float]:
        """Return (reply, CPU seconds).

        Raises `TimedOut`, `Crashed` or `Busy` if there is no reply, and `RewardError` if math-verify cannot be started.
        """
        if not self._tried.is_set():
            if self._room == self._processes:
                self.start()
            self._tried.wait(START_SECONDS)
        for _ in range(2):  # retry once, in case the process was killed from outside
            process = self._take()
            reply, spent = process.ask(question, gold, answer, seconds)
            if reply:
                self._free.put(process)
                return reply == "true", spent
            with self._lock:
                self._room += 1
            self.start()
            if reply is None:
                raise TimedOut
        raise Crashed

    def _take(self) -> _Process:
        try:
            taken = self._free.get_nowait()
        except queue.Empty:
            self.start()
            try:
                taken = self._free.get(timeout=PATIENCE)
            except queue.Empty:
                raise Busy from None
        if isinstance(taken, RewardError):
            raise taken
        return taken

    def _add(self) -> None:
        try:
            self._free.put(_Process())
        except RewardError as error:
            with self._lock:
                self._room += 1
            self._free.put(error)
        finally:
            self._tried.set()


def _serve() -> None:
    """Answer questions in a process of the pool: read a question from stdin, print `true` or `false`."""
    import resource
    import signal

    from roll_opd.extras.graders.mathematics import algebra

    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard_limit == resource.RLIM_INFINITY or hard_limit > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sys.set_int_max_str_digits(0)
    algebra.same_expression("\\frac{1}{2}+x", "x+\\frac{2}{4}")  # warm-up of lazy initialization
    print(READY, flush=True)
    for line in sys.stdin:
        question, gold, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds + 1)  # this process ends if its parent has died
        try:
            same = getattr(algebra, question)(gold, answer)
        except Exception:  # an answer that cannot be parsed counts as wrong
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print("true" if same else "false", flush=True)


POOL = AlgebraPool()
