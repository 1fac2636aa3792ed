"""Find the test cases of a row, in the columns and encodings of public data sets.

    test_cases                               ROLL; a list, an object {"inputs", "outputs"}, or JSON text of one of these
    input_output                             APPS, TACO, LeetCodeDataset
    public_test_cases, private_test_cases    LiveCodeBench; its private cases are packed (base64, zlib, pickle)
    public_tests, private_tests, generated_tests    CodeContests
    test_list                                MBPP, with test_imports and test_setup_code
    test                                     HumanEval, KodCode

The first line of this table that a row has is read.
"""

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

MAX_BYTES = 2**28  # maximum bytes of unpacked cases

COLUMNS = (
    ("test_cases",),
    ("input_output",),
    ("public_test_cases", "private_test_cases"),
    ("public_tests", "private_tests", "generated_tests"),
    ("test_list",),
    ("test",),
)


class BadCases(ValueError):
    """The test cases of a row cannot be used; the message states the reason."""


def written_cases(row: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    """Return (cases, facts): the cases of a row as written, and the row with the facts that its cases share.

    Raises `BadCases` if the row has no cases, or if they cannot be decoded.
    """
    found = [{name: row[name] for name in names if row.get(name) is not None} for names in COLUMNS]
    columns = next(filter(None, found), {})
    facts = dict(row)
    cases: list[Any] = []
    for name, value in columns.items():
        if name == "test":
            value = [{"assert_code": value}]
        value = _decoded(name, value)
        if isinstance(value, Mapping):
            facts |= {key: value[key] for key in value if key not in ("inputs", "outputs", "input", "output")}
            value = _pairs(value)
        if not is_list(value):
            raise BadCases(f"{name} must be a list of cases, or a JSON string of one, not {type(value).__name__}")
        cases += value
    if not cases:
        raise BadCases("test_cases must be a list with at least one case, or a JSON string of one")
    setup = [*_lines(row.get("test_imports")), *_lines(row.get("test_setup_code"))] if "test_list" in columns else []
    return cases, {**facts, "import_prefix": "\n".join(setup)} if setup else facts


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, tuple | list)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return an object, or the object of a JSON text; an empty one for other values."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, Mapping) else {}


def _lines(value: Any) -> Sequence[str]:
    lines = value if is_list(value) else [value]
    return [line for line in lines if isinstance(line, str) and line]


def _decoded(name: str, value: Any) -> Any:
    """Return the value of a column, decoded if it is JSON text or packed as in LiveCodeBench."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        problem = error
    try:
        return json.loads(_unpacked(value))
    except (ValueError, RecursionError, binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, IndexError):
        raise BadCases(f"{name} is not JSON: {problem}") from None


def _unpacked(text: str) -> str:
    """Return the text that LiveCodeBench packed. Raises an error if it holds anything but a text."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
    if not unpacker.eof:
        raise ValueError("cut off, or too long")
    found = _TextOnly(io.BytesIO(data)).load()
    if not isinstance(found, str):
        raise ValueError(type(found).__name__)
    return found


class _TextOnly(pickle.Unpickler):
    """Reads a pickle of plain values. Classes and functions are refused, because a pickle may name any."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module}.{name}")


def _pairs(written: Mapping[str, Any]) -> Any:
    """Convert {"inputs": [...], "outputs": [...]} to a list of cases. Any other object is one case."""
    for keys in (("inputs", "outputs"), ("input", "output")):
        inputs, outputs = (written.get(key) for key in keys)
        if is_list(inputs) and is_list(outputs) and (keys[0] == "inputs" or len(inputs) == len(outputs)):
            if len(inputs) != len(outputs):
                raise BadCases(f"{keys[0]} and {keys[1]} must be lists of the same length")
            return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
    if written.get("inputs") is not None or written.get("outputs") is not None:
        raise BadCases("inputs and outputs must be lists of the same length")
    return [written]
