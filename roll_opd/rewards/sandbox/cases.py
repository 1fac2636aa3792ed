"""The test cases of a row, in the forms that ROLL's data has, as one form."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_opd.rewards.sandbox.assertions import Check, hide_expected

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_TEST = re.compile(r"^def (test_\w*)\(\s*\)", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")


class BadCases(ValueError):
    """The row's test cases cannot be used; the message says why."""


@dataclass(frozen=True)
class Case:
    """A run of the program: what it reads and must print, or what is checked after it."""

    stdin: str = ""
    expected_stdout: str | None = None
    check: Check | None = None
    before: str = ""  # put in front of the program


def program_of(response: str) -> str | None:
    """The last fenced Python block of what follows the thinking; None where there is none."""
    blocks = [code for name, code in _FENCE.findall(response.rpartition("</think>")[2]) if name.lower() in _PYTHON]
    return blocks[-1] if blocks and blocks[-1].strip() else None


def read_cases(row: Mapping[str, Any]) -> tuple[Case, ...]:
    """The cases under a row's `test_cases` (a list, or a JSON string of one). Raises `BadCases`."""
    written = row.get("test_cases")
    if isinstance(written, str):
        try:
            written = json.loads(written)
        except (ValueError, RecursionError) as error:
            raise BadCases(f"test_cases is not JSON: {error}") from None
    if isinstance(written, Mapping):
        written = _pairs(written)
    if not isinstance(written, Sequence) or isinstance(written, str) or not written:
        raise BadCases("test_cases must be a list with at least one case, or a JSON string of one")
    return tuple(_case(item, row) for item in written)


def _pairs(written: Mapping[str, Any]) -> Any:
    """{"inputs": [...], "outputs": [...]} as a list of cases."""
    inputs, outputs = written.get("inputs"), written.get("outputs")
    if inputs is None and outputs is None:
        return [written]
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise BadCases("inputs and outputs must be lists of the same length")
    return [{"stdin": one, "expected_stdout": other} for one, other in zip(inputs, outputs, strict=True)]


def _case(item: Any, row: Mapping[str, Any]) -> Case:
    if isinstance(item, str):
        item = {"assert_code": item}
    if not isinstance(item, Mapping):
        raise BadCases(f"a test case must be an object or assertion code, not {type(item).__name__}")
    code = item.get("assert_code")
    if code is not None:
        return Case(check=_check(_text(code, "assert_code"), item, row), before=_before(item))
    output = _first(item, "expected_stdout", "expected_output", "outputs", "output")
    if output is None:
        raise BadCases("a test case needs assert_code, or stdin and expected_stdout")
    stdin = _first(item, "stdin", "inputs", "input")
    return Case(_text("" if stdin is None else stdin, "stdin"), _text(output, "expected_stdout"), before=_before(item))


def _before(item: Mapping[str, Any]) -> str:
    prefix = item.get("import_prefix")
    return _text(prefix, "import_prefix") + "\n" if prefix else ""


def _check(code: str, item: Mapping[str, Any], row: Mapping[str, Any]) -> Check:
    calls = [f"{name}()" for name in _TEST.findall(code)]
    entry = item.get("entry_point") or row.get("entry_point")
    if "def check(" in code and entry and f"check({entry})" not in code:
        calls.append(f"check({_text(entry, 'entry_point')})")
    try:
        return hide_expected("\n".join([code, *calls]))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadCases(f"assert_code is not Python: {error}") from None


def _first(item: Mapping[str, Any], *names: str) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


def _text(value: Any, name: str) -> str:
    if isinstance(value, tuple | list):  # lines, as some sets write them
        value = "\n".join(map(str, value))
    if not isinstance(value, str):
        raise BadCases(f"{name} must be a text, not {type(value).__name__}")
    return value
