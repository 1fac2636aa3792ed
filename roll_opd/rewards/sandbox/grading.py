"""Grade one case, outside the sandbox, from what the sandbox gave back."""

import re

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
DISK = "disk limit"
NO_CODE = "no code"
REFUSED = "sandbox refused"  # the sandbox broke down twice on this program
NOT_RUN = "not run"  # an earlier case has decided

_XCPU, _KILL = -24, -9
_NUMBER = re.compile(r"(-?[0-9]+)(?:\.([0-9]*))?")


def grade(case: Case, outcome: Outcome) -> str:
    """Return how a case ended: one of the reasons above."""
    if outcome.exit_code is None:
        return outcome.ended if outcome.ended in (TIME, MEMORY, OUTPUT, PROCESSES, DISK) else REFUSED
    report = read_report(outcome.report)
    if outcome.ended == OUTPUT:
        return OUTPUT
    if outcome.exit_code != 0:
        return _failure(outcome.exit_code, report.get("error"))
    if case.check is None:
        return PASSED if case.expected_stdout is None or same_output(outcome.stdout, case.expected_stdout) else WRONG
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
    """Return whether the lines are the same words, or numbers of the same value.

    Spaces around and between words and empty lines at both ends do not count.
    """
    lines = output.decode("utf-8", "replace").strip().split("\n")
    wanted = expected.strip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, wanted: str) -> bool:
    words, wanted_words = line.split(), wanted.split()
    return words == wanted_words or (len(words) == len(wanted_words) and all(map(_same_word, words, wanted_words)))


def _same_word(word: str, wanted: str) -> bool:
    """Zeros at the end of a fraction do not count; those at the front do, as they may be digits of a code."""
    found, asked = _NUMBER.fullmatch(word), _NUMBER.fullmatch(wanted)
    if not found or not asked:
        return word == wanted
    return found[1] == asked[1] and (found[2] or "").rstrip("0") == (asked[2] or "").rstrip("0")
