"""Parse the test cases of a row, in the formats of ROLL, APPS, TACO and LiveCodeBench."""

import ast
import json
import keyword
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from roll_opd.extras.graders.sandbox.assertions import HiddenCheck, check_of_call, hide_expected, is_wrapped
from roll_opd.extras.graders.sandbox.case_columns import BadCases, as_mapping, is_list, written_cases
from roll_opd.extras.graders.sandbox.response import answer_of

_TEST = re.compile(r"^def (test_\w*)\(\s*\)", re.MULTILINE)
_DEFINED = re.compile(r"^[ \t]*def (\w+)", re.MULTILINE)
_OUTPUTS = ("expected_stdout", "expected_output", "outputs", "output")
FUNCTION_KEYS = ("fn_name", "func_name", "test_case_function")  # of APPS and TACO, LiveCodeBench, ROLL
_RESPONSE = "{response}"  # placeholder in the code of a case about text


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
    """Parse the test cases of a row; raise `BadCases` if one of them cannot be read.

    A case that cannot be read must not count as failed, so no case of such a row is run.
    """
    written, facts = written_cases(row)
    if facts.get("case_type") == "text":
        return tuple(_about_text(item, answer_of(response)) for item in written)
    names = [_function(item, facts) for item in written]
    calls = [_call(item) for item, name in zip(written, names, strict=True) if name]
    wrapped = bool(calls) and is_wrapped([answer for *_, answer in calls])
    left = iter(calls)
    return tuple(
        _of_call(name, *next(left), wrapped, _before(item, facts)) if name else _case(item, facts)
        for item, name in zip(written, names, strict=True)
    )


def needs_program(cases: Sequence[Case]) -> bool:
    return any(case.about_text is None for case in cases)


def called_by(cases: Sequence[Case]) -> frozenset[str]:
    """Return the names of the functions and classes that the checks of the cases call."""
    return frozenset().union(*(case.check.called for case in cases if case.check))


def _function(item: Any, facts: Mapping[str, Any]) -> str:
    """Return the name of the function that a case calls; "" if the case runs the whole program or has assertions."""
    if not isinstance(item, Mapping) or item.get("assert_code") is not None:
        return ""
    kind = str(item.get("testtype") or item.get("type") or "").lower()
    is_call = any(word in kind for word in ("func", "call"))
    if item.get("testtype") and not (is_call or "std" in kind):
        raise BadCases(f"testtype must be stdin or functional, not {kind!r}")
    name = "" if "std" in kind else _named(item) or _named(facts)
    if not name and kind == "" and "stdin" not in item and "expected_stdout" not in item:
        name = str(facts.get("entry_point") or "")
    if is_call and not name:
        name = _only_method(facts.get("starter_code"))
    if not name:
        return ""
    last = name.rpartition(".")[2]
    if not last.isidentifier() or keyword.iskeyword(last):
        raise BadCases(f"fn_name must be the name of a function, not {name!r}")
    return last


def _named(values: Mapping[str, Any]) -> str:
    """Return the name of the function in one of the keys that public data sets have for it."""
    places = (values, as_mapping(values.get("metadata")))
    names = (str(place.get(key) or "") for place in places for key in FUNCTION_KEYS)
    return next((name for name in names if name not in ("", "None")), "")


def _only_method(code: Any) -> str:
    """Return the name of the function or method in the starter code of a task; raise `BadCases` if it has not one."""
    names = set(_DEFINED.findall(code)) if isinstance(code, str) else set()
    names = {name for name in names if not name.startswith("__")}
    if len(names) != 1:
        raise BadCases(
            "a case of testtype functional needs the name of its function; add fn_name, or metadata.func_name"
        )
    return names.pop()


Arguments = tuple[Sequence[Any], Mapping[str, Any]]


def _call(item: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any], Any]:
    """Return (positional arguments, named arguments, expected value) of a case that calls a function."""
    written, answer = _input(item), _output(item)
    if answer is None and not any(name in item for name in _OUTPUTS):
        raise BadCases("if fn_name is set, each case needs inputs and outputs")
    arguments: Any = written
    named: Mapping[str, Any] = {}
    if isinstance(written, str):
        arguments, named = _arguments(written)
    elif isinstance(written, Mapping):
        arguments, named = (), written
    if not is_list(arguments):
        raise BadCases(f"if fn_name is set, the input must be a list of arguments, not {type(arguments).__name__}")
    return arguments, named, _value_or_text(answer) if isinstance(written, str) else answer


def _arguments(text: str) -> Arguments:
    """Return the arguments in a text: one line of JSON per argument, or as in a call (`nums = [3, 3], target = 6`)."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return [json.loads(line) for line in lines], {}
    except (ValueError, RecursionError):
        pass
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return [ast.literal_eval(argument) for argument in call.args], named
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, AssertionError):
        raise BadCases(
            "if fn_name is set, the input must be a list of arguments, one JSON argument per line, or the arguments of"
            f" a call, not {text[:80]!r}"
        ) from None


def _of_call(
    name: str, arguments: Sequence[Any], named: Mapping[str, Any], answer: Any, wrapped: bool, before: str
) -> Case:
    try:
        return Case(check=check_of_call(name, arguments, named, answer, wrapped), before=before)
    except (ValueError, RecursionError) as error:
        raise BadCases(f"the arguments or the result of {name} are not plain values: {error}") from None


def _case(item: Any, row: Mapping[str, Any]) -> Case:
    if isinstance(item, str):
        item = {"assert_code": item}
    if not isinstance(item, Mapping):
        raise BadCases(f"a test case must be an object or assertion code, not {type(item).__name__}")
    code = item.get("assert_code")
    if code is not None:
        return Case(check=_check(_text(code, "assert_code"), item, row), before=_before(item, row))
    output = _output(item)
    if output is None:
        raise BadCases("a test case needs assert_code, or stdin and expected_stdout")
    stdin = _text("" if (written := _input(item)) is None else written, "stdin")
    return Case(stdin, _text(output, "expected_stdout"), before=_before(item, row))


def _about_text(item: Any, answer: str) -> Case:
    code = item.get("assert_code") if isinstance(item, Mapping) else item
    if not isinstance(code, str):
        raise BadCases("if case_type is text, each test case needs assert_code")
    return Case(about_text=code.replace(_RESPONSE, repr(answer.strip())))


def _before(item: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    prefix = item.get("import_prefix") or row.get("import_prefix")
    return _text(prefix, "import_prefix") + "\n" if prefix else ""


def _check(code: str, item: Mapping[str, Any], row: Mapping[str, Any]) -> HiddenCheck:
    calls = [f"{name}()" for name in _TEST.findall(code)]
    entry = item.get("entry_point") or row.get("entry_point")
    if "def check(" in code and entry and f"check({entry})" not in code:
        calls.append(f"check({_text(entry, 'entry_point')})")
    try:
        tree = ast.parse(code)
        if uncalled := _uncalled_test(tree):
            raise BadCases(f"nothing calls {uncalled} of assert_code; write assertions, or functions test_...()")
        if any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare) for node in tree.body):
            raise BadCases("assert_code has a comparison that nothing checks; write assert before it")
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
    return _first(item, *_OUTPUTS)


def _first(item: Mapping[str, Any], *names: str) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


def _value_or_text(value: Any) -> Any:
    """Return the value that a text writes as JSON or as a literal of Python, or else the text."""
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return read(value.strip())
    return value


def _text(value: Any, name: str) -> str:
    if is_list(value):  # some datasets have lists of lines
        if not all(isinstance(line, str | int | float) and not isinstance(line, bool) for line in value):
            raise BadCases(f"{name} must be a string or a list of lines; arguments of a function need fn_name")
        value = "\n".join(map(str, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise BadCases(f"{name} must be a string, not {type(value).__name__}")
    return value
