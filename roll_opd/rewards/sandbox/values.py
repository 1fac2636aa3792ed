"""Decode untrusted values that the supervisor's `plain` encoded."""

import json
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

# the program controls the cost of decoding: equal hashes make sets slow, large terms make fractions slow
MAX_MEMBERS = 2000  # of a set or a mapping; expected literals are shorter
MAX_DIGITS = 1000  # of a fraction's terms


class Unreadable(ValueError):
    """A report or a value in it is malformed."""


def read_report(report: bytes) -> dict[str, Any]:
    """Parse the object of a report; {} if malformed."""
    try:
        found = json.loads(report, parse_int=_key)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(digits: str) -> int:
    """Parse an expectation's number, the only JSON integer in a report; rejects long ones, which parse slowly."""
    if len(digits) > 9:
        raise Unreadable
    return int(digits)


def read_value(written: Any) -> Any:
    """Decode a value of the program's process; raises `Unreadable`."""
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
