"""Test cases that call a function, or a method of class `Solution`, as in APPS, TACO and LiveCodeBench.

Expected results stay outside of the sandbox.
"""

from collections.abc import Sequence
from typing import Any

from roll_opd.rewards.sandbox.assertions import Check, Expectation
from roll_opd.rewards.sandbox.tolerance import same_value


def check_of_call(name: str, arguments: Sequence[Any], answer: Any, wrapped: bool) -> Check:
    """Return the check of one call; `wrapped`: the answer may be in a list of one. Raises ValueError."""
    wanted = plain(answer)
    accepted = [wanted, wanted[0]] if wrapped else [wanted]
    written = ", ".join(repr(plain(argument)) for argument in arguments)
    code = f"_seen(0, getattr(Solution() if 'Solution' in globals() else __import__('solution'), {name!r})({written}))"

    def is_accepted(value: Any, _: None, tolerance: float) -> bool:
        return any(same_value(plain(value), one, tolerance) for one in accepted)

    return Check(code, (Expectation(is_accepted, None, always=True),), frozenset({name}))


def is_wrapped(answers: Sequence[Any]) -> bool:
    """Return whether every answer of a row is a list of one, as in APPS; lists that are real answers would differ in
    length.
    """
    return all(isinstance(answer, tuple | list) and len(answer) == 1 for answer in answers)


def plain(value: Any) -> Any:
    """Convert a value to JSON types: tuples to lists, keys to strings. Raises ValueError."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if value - value != 0:
            raise ValueError(f"{value} cannot be written as code")
        return value
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): plain(item) for key, item in value.items()}
    raise ValueError(f"{type(value).__name__} is not a plain value")
