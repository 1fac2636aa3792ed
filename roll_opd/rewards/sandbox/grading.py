"""Grade one test case outside of the sandbox from its outcome."""

from roll_opd.rewards.sandbox.cases import Case
from roll_opd.rewards.sandbox.process import Outcome
from roll_opd.rewards.sandbox.tolerance import TOLERANCE, same_output
from roll_opd.rewards.sandbox.values import read_report

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
NOT_RUN = "not run"  # decided by an earlier case

_XCPU, _KILL = -24, -9


def grade(case: Case, outcome: Outcome, tolerance: float = TOLERANCE) -> str:
    """Return the result of a case, one of the reasons above; numbers with a fraction may differ by `tolerance`."""
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
