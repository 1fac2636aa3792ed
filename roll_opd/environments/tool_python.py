"""Python tool: extract the program from a response and run it in `roll_opd.rewards.sandbox`."""

import atexit
import math
import os
import sys
import threading

from roll_opd.environments.interface import EnvironmentFailure
from roll_opd.rewards.builtin.code_sandbox import UNSAFE
from roll_opd.rewards.sandbox.pool import Pool
from roll_opd.rewards.sandbox.response import answer_of, program_of
from roll_opd.rewards.sandbox.settings import Limits, SandboxError

OPEN, CLOSE = "<code>", "</code>"
FENCES = ("```py", "```Py")
NOTHING = "(the program printed nothing; print what you want to see)"
# errors go to stdout: a sandboxed program has no stderr
WRAPPED = """\
import sys as _sys, traceback as _traceback
try:
    exec(compile({program!r}, "program.py", "exec"), {{**globals(), "__name__": "__main__"}})
except SystemExit:
    pass
except BaseException as _error:
    _sys.stdout.flush()
    _frames = _error.__traceback__ and _error.__traceback__.tb_next
    print("".join(_traceback.format_exception(type(_error), _error, _frames, limit=-8)), end="")
"""


def tool_program(response: str) -> str | None:
    """Return the program in a response; None without one.

    It is between the last <code> and </code> after the thought, else in the last fenced Python block.
    """
    text = answer_of(response)
    before, marked, _ = text.rpartition(CLOSE)
    if marked and OPEN in before:
        inside = before.rpartition(OPEN)[2]
        return (program_of(inside) if "```" in inside else inside) or None
    return program_of(text) if any(fence in text for fence in FENCES) else None


class PythonTool:
    """Thread-safe program runner; tools with equal limits share one process per CPU."""

    def __init__(self, seconds: float, unsafe: bool = False, most_characters: int = 4000) -> None:
        """Create a runner with `seconds` of CPU per program; `unsafe`: no sandbox. Processes start on first use."""
        self._limits = Limits(cpu_seconds=math.ceil(seconds), wall_seconds=2.0 * seconds)
        self._unsafe, self._most = unsafe, most_characters

    def run(self, program: str) -> str:
        """Return a program's output, with the reason if it was stopped.

        Raises `EnvironmentFailure` if this machine has no sandbox.
        """
        try:
            pool, places = _pool(self._limits, self._unsafe)
            with places:
                outcome = pool.outcome(WRAPPED.format(program=program))
        except SandboxError as error:
            raise EnvironmentFailure(f"python tool: {error}") from error
        if outcome is None:
            return "(the program broke its sandbox)"
        printed = outcome.stdout.decode("utf-8", "replace").strip()
        if len(printed) > self._most:
            half = self._most // 2
            printed = f"{printed[:half]}\n... ({len(printed) - 2 * half} characters left out)\n{printed[-half:]}"
        ended = f"(ended: {outcome.ended})" if outcome.exit_code is None or outcome.ended != "ended" else ""
        if not ended and outcome.exit_code:
            ended = "(ended: time limit)" if outcome.exit_code in (-9, -24) else f"(exit code {outcome.exit_code})"
        return "\n".join(filter(None, (printed, ended))) or NOTHING


_POOLS: dict[tuple[Limits, bool], tuple[Pool, threading.Semaphore]] = {}
_STARTING = threading.Lock()


def _pool(limits: Limits, unsafe: bool) -> tuple[Pool, threading.Semaphore]:
    """Return the process's sandbox pool with these limits and its semaphore."""
    with _STARTING:
        if (limits, unsafe) not in _POOLS:
            if unsafe:
                print(UNSAFE, file=sys.stderr, flush=True)
            size = len(os.sched_getaffinity(0))
            pool = Pool(limits, size, unsafe)
            atexit.register(pool.close)
            _POOLS[limits, unsafe] = pool, threading.Semaphore(size)
        return _POOLS[limits, unsafe]
