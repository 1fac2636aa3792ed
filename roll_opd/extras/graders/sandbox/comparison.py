"""Compare outputs and returned values with the expected values.

Numbers with a fraction may differ by a tolerance:

- A number is right within `tolerance * max(1, |expected|)`, as in programming contests.
- If the expected number is an integer and the returned number has a fraction, the number is right within `tolerance`.
- Two integers of any length are compared digit by digit.

Returned values are untrusted. The function `plain` in the sandbox encodes them, and `read_value` decodes them.
"""

import json
import math
import re
from decimal import Context, Decimal, DecimalException, InvalidOperation
from fractions import Fraction
from numbers import Real
from typing import Any

TOLERANCE = 1e-6
_CONTEXT = Context(prec=40)
_NUMBER = re.compile(r"(-?[0-9]+)(?:\.([0-9]*))?")
# a number in a word, such as `[0.5,` or `x=0.5`; not in names or versions (1.2.3)
_INSIDE = re.compile(
    r"(?<![\w.])([-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:nan|inf|infinity))(?![\w.])",
    re.IGNORECASE,
)


def same_output(output: bytes, expected: str, tolerance: float = TOLERANCE) -> bool:
    """Return whether the output has the expected lines with the same words.

    Numbers in the words may differ by the tolerance. Spaces around and between words do not count, and neither do empty
    lines at the start and the end.
    """
    lines = output.decode("utf-8", "replace").strip().split("\n")
    wanted = expected.strip().split("\n")
    return len(lines) == len(wanted) and all(
        _same_line(line, other, tolerance) for line, other in zip(lines, wanted, strict=True)
    )


def same_value(value: Any, wanted: Any, tolerance: float = TOLERANCE) -> bool:
    """Return whether a value equals the expected value.

    If one of two numbers has a fraction, they may differ by the tolerance. Lists, tuples and the values of mappings are
    compared member by member. Sets and keys are compared exactly.
    """
    if _is_number(value) and _is_number(wanted):
        if value == wanted:
            return True
        has_fraction = isinstance(wanted, float | Decimal | Fraction)
        if not (has_fraction or isinstance(value, float | Decimal | Fraction)):
            return False
        number, expected_number = float(value), float(wanted)
        return (
            abs(number - expected_number)
            <= tolerance * max(1.0, abs(expected_number) if has_fraction else 1.0)
            < math.inf
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(value, list | tuple)
            and isinstance(value, list) is isinstance(wanted, list)
            and len(value) == len(wanted)
            and all(same_value(one, other, tolerance) for one, other in zip(value, wanted, strict=True))
        )
    if isinstance(wanted, dict):
        return (
            isinstance(value, dict)
            and value.keys() == wanted.keys()
            and all(same_value(value[key], wanted[key], tolerance) for key in wanted)
        )
    return bool(value == wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Decimal) and not isinstance(value, bool)


def _same_line(line: str, wanted: str, tolerance: float) -> bool:
    words, wanted_words = line.split(), wanted.split()
    return words == wanted_words or (
        len(words) == len(wanted_words)
        and all(_same_word(word, other, tolerance) for word, other in zip(words, wanted_words, strict=True))
    )


def _same_word(word: str, wanted: str, tolerance: float) -> bool:
    """Return whether two words are equal, with numbers within the tolerance.

    Trailing zeros of a fraction are ignored. Leading zeros of an integer are compared, because the integer may be a
    code such as 007.
    """
    if word == wanted:
        return True
    found, expected_number = _NUMBER.fullmatch(word), _NUMBER.fullmatch(wanted)
    if found and expected_number:
        if found[1] == expected_number[1] and (found[2] or "").rstrip("0") == (expected_number[2] or "").rstrip("0"):
            return True
        if found[2] is None and expected_number[2] is None:
            return False
    # parts at odd places are numbers
    parts, wanted_parts = _INSIDE.split(word), _INSIDE.split(wanted)
    return len(parts) == len(wanted_parts) and all(
        one == other or (bool(place % 2) and _close(one, other, tolerance))
        for place, (one, other) in enumerate(zip(parts, wanted_parts, strict=True))
    )


def _close(text: str, wanted: str, tolerance: float) -> bool:
    if _is_whole(text) and _is_whole(wanted):
        return False  # different digits
    try:
        number, expected_number = Decimal(text), Decimal(wanted)
        if not (number.is_finite() and expected_number.is_finite()):
            return str(number) == str(expected_number)  # NaN and the infinities
        size = Decimal(1) if _is_whole(wanted) else max(Decimal(1), abs(expected_number))
        gap = abs(_CONTEXT.subtract(number, expected_number))
        return gap <= _CONTEXT.multiply(Decimal(tolerance), size)
    except DecimalException:
        return False


def _is_whole(text: str) -> bool:
    return text.lstrip("+-").isdigit()


# the program controls the cost of decoding: equal hashes make sets slow, large terms make fractions slow
MAX_MEMBERS = 2000  # maximum members of a set or mapping; expected literals are shorter
MAX_DIGITS = 1000  # maximum digits of a fraction's terms


class Unreadable(ValueError):
    """A report or a value in a report is malformed."""


def read_report(report: bytes) -> dict[str, Any]:
    """Parse a report, which is a JSON object; return {} if it is malformed."""
    try:
        found = json.loads(report, parse_int=_key)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(digits: str) -> int:
    """Parse an integer in a report, which must be the number of an expectation.

    A JSON report has no other integers. Long integers are rejected, because parsing them is slow.
    """
    if len(digits) > 9:
        raise Unreadable
    return int(digits)


def read_value(written: Any) -> Any:
    """Decode a value that the process of the program wrote; raise `Unreadable` if it is malformed."""
    if written is None or isinstance(written, bool):
        return written
    try:
        return _MAKE[written[0]](*written[1:])
    except (LookupError, TypeError, ValueError, AttributeError, InvalidOperation, ArithmeticError, RecursionError):
        raise Unreadable from None


def _values(items: Any) -> list[Any]:
    return [read_value(item) for item in items]


def _members(items: Any) -> Any:
    if len(items) > MAX_MEMBERS:
        raise Unreadable
    return items


def _term(text: Any) -> int:
    if len(text) > MAX_DIGITS:
        raise Unreadable
    return int(text, 16)


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise Unreadable
    return text


_MAKE: dict[str, Any] = {
    "s": _text,
    "i": lambda text: int(text, 16),
    "f": float.fromhex,
    "c": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "b": bytes.fromhex,
    "d": Decimal,
    "q": lambda over, under: Fraction(_term(over), _term(under)),
    "l": _values,
    "t": lambda items: tuple(_values(items)),
    "e": lambda items: frozenset(_values(_members(items))),
    "m": lambda pairs: {read_value(key): read_value(item) for key, item in _members(pairs)},
}
