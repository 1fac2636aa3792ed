"""The verdict on one case, made outside from what the sandbox gave back."""

from roll_opd.rewards.sandbox.cases import Case
from roll_opd.rewards.sandbox.process import Outcome
from roll_opd.rewards.sandbox.values import read_report

PASSED = "passed"
WRONG = "wrong answer"
RUNTIME = "runtime error"
TIME = "time limit"
MEMORY = "memory limit"
OUTPUT = "output limit"
PROCESSES = "process limit"
NO_CODE = "no code"
REFUSED = "sandbox refused"  # the sandbox broke down twice on this program
NOT_RUN = "not run"  # an earlier case has decided

_XCPU, _KILL = -24, -9


def judge(case: Case, outcome: Outcome) -> str:
    """One of the reasons above."""
    if outcome.exit_code is None:
        return outcome.ended if outcome.ended in (TIME, MEMORY, OUTPUT, PROCESSES) else REFUSED
    report = read_report(outcome.report)
    if outcome.ended == OUTPUT:
        return OUTPUT
    if outcome.exit_code != 0:
        return _failure(outcome.exit_code, report.get("error"))
    if case.check is None:
        return PASSED if same_output(outcome.stdout, case.expected_stdout or "") else WRONG
    if "seen" not in report:
        return RUNTIME  # it ended before the check did
    return PASSED if case.check.passes(report["seen"]) else WRONG


def _failure(exit_code: int, error: object) -> str:
    if exit_code in (_XCPU, _KILL):  # the limit of CPU seconds, soft and hard
        return TIME
    if error == "MemoryError":
        return MEMORY
    return WRONG if error == "AssertionError" else RUNTIME


def same_output(output: bytes, expected: str) -> bool:
    """Whether the lines are the same words; spaces around and between them and empty lines at the end do not count."""
    return _words(output.decode("utf-8", "replace")) == _words(expected)


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]
