"""Pool of sandboxes that are started in advance, and the grading of test cases.

Each sandbox is used for one program. `grade` grades a test case by its outcome.
"""

import queue
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from roll_opd.extras.graders.sandbox.bubblewrap import CaseLimits, SandboxError
from roll_opd.extras.graders.sandbox.cases import Case
from roll_opd.extras.graders.sandbox.comparison import TOLERANCE, read_report, same_output
from roll_opd.extras.graders.sandbox.process import CaseOutcome, Sandbox

PASSED = "passed"
WRONG = "wrong answer"
RUNTIME = "runtime error"
TIME = "time limit"
MEMORY = "memory limit"
OUTPUT = "output limit"
PROCESSES = "process limit"
DISK = "disk limit"
NO_CODE = "no code"
REFUSED = "sandbox refused"  # the sandbox failed twice on this program
NOT_RUN = "not run"  # an earlier case has decided the result

_XCPU, _KILL = -24, -9


def grade(case: Case, outcome: CaseOutcome, tolerance: float = TOLERANCE) -> str:
    """Return the result of a case, such as `PASSED`.

    Args:
        tolerance: allowed difference of numbers with a fraction.
    """
    if outcome.exit_code is None:
        return outcome.ended if outcome.ended in (TIME, MEMORY, OUTPUT, PROCESSES, DISK) else REFUSED
    report = read_report(outcome.report)
    if outcome.ended == OUTPUT:
        return OUTPUT
    if outcome.exit_code != 0:
        return _failure(outcome.exit_code, report.get("error"))
    if case.check is None:
        wanted = case.expected_stdout
        return PASSED if wanted is None or same_output(outcome.stdout, wanted, tolerance) else WRONG
    if "seen" not in report:
        return RUNTIME  # exited before the end of the check
    return PASSED if case.check.passes(report["seen"], tolerance) else WRONG


def _failure(exit_code: int, error: object) -> str:
    if exit_code in (_XCPU, _KILL):  # the limit of CPU seconds, soft and hard
        return TIME
    if error == "MemoryError":
        return MEMORY
    return WRONG if error == "AssertionError" else RUNTIME


ATTEMPTS = 2  # attempts per program; a sandbox may have been killed from outside
PROBE = ("print(6 * 7)", (Case(expected_stdout="42"),))


class SandboxPool:
    """Thread-safe pool that keeps `size` sandboxes ready."""

    def __init__(self, limits: CaseLimits, size: int, unsafe: bool = False, packages: Sequence[Path] = ()) -> None:
        """Start the sandboxes and run a probe program.

        Raises `SandboxError` if the probe program fails.
        """
        self._limits, self._size, self._unsafe, self._packages = limits, size, unsafe, packages
        self._ready: queue.Queue[Sandbox | SandboxError] = queue.Queue()
        self._wanted: queue.Queue[bool] = queue.Queue()
        self._keeper = threading.Thread(target=self._keep, name="code_sandbox", daemon=True)
        for _ in range(size):
            self._wanted.put(True)
        self._keeper.start()
        try:
            self._probe()
        except SandboxError:
            self.close()
            raise

    def run(self, program: str, cases: Sequence[Case], all_cases: bool, tolerance: float = TOLERANCE) -> list[str]:
        """Return the results of the cases.

        If a case exceeds its time limit, the cases after it are not run. Unless `all_cases` is set, this also applies
        to every other failure.

        If the program breaks its sandbox twice, the probe program is run. If the probe program passes, the first result
        is `REFUSED`. If it fails too, `SandboxError` is raised.
        """
        for _ in range(ATTEMPTS):
            try:
                reasons = self._attempt(program, cases, all_cases, tolerance)
            except SandboxError:
                continue
            if REFUSED not in reasons:
                return reasons
        self._probe()
        return [REFUSED] + [NOT_RUN] * (len(cases) - 1)

    def outcome(self, program: str, stdin: str = "") -> CaseOutcome | None:
        """Run a program without grading it, and return its outcome; None if it breaks its sandbox.

        Raises `SandboxError` if no sandbox can be started.
        """
        with closing(self._take_ready()) as sandbox:
            return sandbox.run(program, stdin, None)

    def close(self) -> None:
        """Close all idle sandboxes.

        A sandbox that runs a program is closed after it.
        """
        self._wanted.put(False)
        self._keeper.join()
        while not self._ready.empty():
            sandbox = self._ready.get()
            if isinstance(sandbox, Sandbox):
                sandbox.close()

    def _probe(self) -> None:
        found = self._attempt(*PROBE, all_cases=True)
        if found != [PASSED]:
            raise SandboxError(f"code_sandbox: the sandbox starts but does not work: {found[0]}")

    def _attempt(self, program: str, cases: Sequence[Case], all_cases: bool, tolerance: float = TOLERANCE) -> list[str]:
        reasons: list[str] = []
        with closing(self._take_ready()) as sandbox:
            for case in cases:
                check = None if case.check is None else case.check.code
                outcome = sandbox.run(case.program(program), case.stdin, check, case.before)
                reasons.append(REFUSED if outcome is None else grade(case, outcome, tolerance))
                if reasons[-1] in (TIME, REFUSED) or (reasons[-1] != PASSED and not all_cases):
                    break
        return reasons + [NOT_RUN] * (len(cases) - len(reasons))

    def _take_ready(self) -> Sandbox:
        """Return a sandbox that is ready; raise `SandboxError` if there is none.

        Sandboxes that have died are skipped.
        """
        for _ in range(self._size):
            with suppress(SandboxError):
                return self._take()
        return self._take()

    def _take(self) -> Sandbox:
        sandbox = self._ready.get()
        self._wanted.put(True)
        if isinstance(sandbox, SandboxError):
            raise sandbox
        try:
            sandbox.wait_until_ready()
        except SandboxError:
            sandbox.close()
            raise
        return sandbox

    def _keep(self) -> None:
        """Start sandboxes until the pool is closed.

        They are all started in this thread, because the kernel kills a sandbox when the thread that started it ends.
        """
        while self._wanted.get():
            try:
                self._ready.put(Sandbox(self._limits, self._unsafe, self._packages))
            except SandboxError as error:
                self._ready.put(error)
            except Exception as error:  # out of memory, processes or descriptors: pass the error to the waiting caller
                self._ready.put(SandboxError(f"code_sandbox: no sandbox can be started: {error!r}"))
