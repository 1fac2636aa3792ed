"""Parse the test cases of a row, in the formats of ROLL, APPS, TACO and LiveCodeBench."""

import ast
import json
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from roll_opd.rewards.sandbox.assertions import HiddenCheck, check_of_call, hide_expected, is_wrapped
from roll_opd.rewards.sandbox.response import answer_of

_TEST = re.compile(r"^def (test_\w*)\(\s*\)", re.MULTILINE)
_RESPONSE = "{response}"  # placeholder in the code of a case about text


class BadCases(ValueError):
    """The test cases of a row cannot be used; the message states the reason."""


@dataclass(frozen=True)
class Case:
    """One run of the program.

    A case has an input and the expected output, or a check that runs after the program.
    """

    stdin: str = ""
    expected_stdout: str | None = None  # None: the program must only exit without an error
    check: HiddenCheck | None = None
    before: str = ""  # code to run before the program
    about_text: str | None = None  # code that replaces the program, with the answer as a literal

    def program(self, program: str) -> str:
        return program if self.about_text is None else self.about_text


def read_cases(row: Mapping[str, Any], response: str = "") -> tuple[Case, ...]:
    """Parse the test cases of a row; raise `BadCases` if they cannot be used.

    They are in `test_cases`, or in `input_output` of APPS. The value is a list or a mapping, or JSON text of one of
    these.
    """
    written = row.get("test_cases")
    if written is None:
        written = row.get("input_output")
    if isinstance(written, str):
        try:
            written = json.loads(written)
        except (ValueError, RecursionError) as error:
            raise BadCases(f"test_cases is not JSON: {error}") from None
    name = _function(row)
    if isinstance(written, Mapping):
        name = _function(written) or name
        written = _pairs(written)
    if not isinstance(written, Sequence) or isinstance(written, str) or not written:
        raise BadCases("test_cases must be a list with at least one case, or a JSON string of one")
    if row.get("case_type") == "text":
        return tuple(_about_text(item, answer_of(response)) for item in written)
    if name:
        return _calls(written, name)
    return tuple(_case(item, row) for item in written)


def needs_program(cases: Sequence[Case]) -> bool:
    return any(case.about_text is None for case in cases)


def called_by(cases: Sequence[Case]) -> frozenset[str]:
    """Return the names of the functions and classes that the checks of the cases call."""
    return frozenset().union(*(case.check.called for case in cases if case.check))


def _function(row: Mapping[str, Any]) -> str:
    """Return the name of the function that the cases call; "" if the cases run the whole program."""
    name = row.get("fn_name") or row.get("test_case_function")
    if name in (None, "", "None"):
        return ""
    last = str(name).rpartition(".")[2]
    if not last.isidentifier() or keyword.iskeyword(last):
        raise BadCases(f"fn_name must be the name of a function, not {name!r}")
    return last


def _pairs(written: Mapping[str, Any]) -> Any:
    """Convert {"inputs": [...], "outputs": [...]} to a list of cases."""
    inputs, outputs = written.get("inputs"), written.get("outputs")
    if inputs is None and outputs is None:
        return [written]
    if not _is_list(inputs) or not _is_list(outputs) or len(inputs) != len(outputs):
        raise BadCases("inputs and outputs must be lists of the same length")
    return [{"stdin": one, "expected_stdout": other} for one, other in zip(inputs, outputs, strict=True)]


def _calls(written: Sequence[Any], name: str) -> tuple[Case, ...]:
    pairs = []
    for item in written:
        if not isinstance(item, Mapping):
            raise BadCases("if fn_name is set, each case needs inputs and outputs")
        arguments, answer = _input(item), _output(item)
        if isinstance(arguments, str):  # one JSON argument per line
            try:
                arguments, answer = (
                    [json.loads(line) for line in arguments.splitlines() if line.strip()],
                    _json_or_text(answer),
                )
            except (ValueError, RecursionError) as error:
                raise BadCases(
                    f"if fn_name is set, the input must be a list of arguments, or one JSON argument per line: {error}"
                ) from None
        if not _is_list(arguments):
            raise BadCases(f"if fn_name is set, the input must be a list of arguments, not {type(arguments).__name__}")
        pairs.append((arguments, answer))
    wrapped = is_wrapped([answer for _, answer in pairs])
    try:
        return tuple(Case(check=check_of_call(name, arguments, answer, wrapped)) for arguments, answer in pairs)
    except (ValueError, RecursionError) as error:
        raise BadCases(f"the arguments or the result of {name} are not plain values: {error}") from None


def _case(item: Any, row: Mapping[str, Any]) -> Case:
    if isinstance(item, str):
        item = {"assert_code": item}
    if not isinstance(item, Mapping):
        raise BadCases(f"a test case must be an object or assertion code, not {type(item).__name__}")
    code = item.get("assert_code")
    if code is not None:
        return Case(check=_check(_text(code, "assert_code"), item, row), before=_before(item))
    output = _output(item)
    if output is None:
        raise BadCases("a test case needs assert_code, or stdin and expected_stdout")
    stdin = _input(item)
    return Case(_text("" if stdin is None else stdin, "stdin"), _text(output, "expected_stdout"), before=_before(item))


def _about_text(item: Any, answer: str) -> Case:
    code = item.get("assert_code") if isinstance(item, Mapping) else item
    if not isinstance(code, str):
        raise BadCases("if case_type is text, each test case needs assert_code")
    return Case(about_text=code.replace(_RESPONSE, repr(answer.strip())))


def _before(item: Mapping[str, Any]) -> str:
    prefix = item.get("import_prefix")
    return _text(prefix, "import_prefix") + "\n" if prefix else ""


def _check(code: str, item: Mapping[str, Any], row: Mapping[str, Any]) -> HiddenCheck:
    calls = [f"{name}()" for name in _TEST.findall(code)]
    entry = item.get("entry_point") or row.get("entry_point")
    if "def check(" in code and entry and f"check({entry})" not in code:
        calls.append(f"check({_text(entry, 'entry_point')})")
    try:
        if uncalled := _uncalled_test(ast.parse(code)):
            raise BadCases(f"nothing calls {uncalled} of assert_code; write assertions, or functions test_...()")
        return hide_expected("\n".join([code, *calls]))
    except BadCases:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadCases(f"assert_code is not Python: {error}") from None


def _uncalled_test(tree: ast.Module) -> str | None:
    """Return the name of a test class or of a test coroutine that nothing calls; None if there is none.

    Every program would pass such a test.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in tree.body:
        if not isinstance(node, ast.AsyncFunctionDef | ast.ClassDef):
            continue
        named = node.body if isinstance(node, ast.ClassDef) else [node]
        if node.name not in used and any(getattr(item, "name", "").startswith("test_") for item in named):
            return node.name
    return None


def _input(item: Mapping[str, Any]) -> Any:
    return _first(item, "stdin", "inputs", "input")


def _output(item: Mapping[str, Any]) -> Any:
    return _first(item, "expected_stdout", "expected_output", "outputs", "output")


def _first(item: Mapping[str, Any], *names: str) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, tuple | list)


def _json_or_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text(value: Any, name: str) -> str:
    if _is_list(value):  # some datasets have lists of lines
        value = "\n".join(map(str, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise BadCases(f"{name} must be a string, not {type(value).__name__}")
    return value
