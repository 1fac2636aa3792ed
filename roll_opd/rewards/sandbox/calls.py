"""Cases that call a function of the program, or a method of its class `Solution`, with arguments, as APPS, TACO and
LiveCodeBench have them. What the call must give stays outside.
"""

from collections.abc import Sequence
from typing import Any

from roll_opd.rewards.sandbox.assertions import Check, Expectation
from roll_opd.rewards.sandbox.tolerance import same_value


def check_of_call(name: str, arguments: Sequence[Any], answer: Any, wrapped: bool) -> Check:
    """Return the check of one call. `wrapped`: the answer may stand in a list of one. ValueError for odd arguments."""
    wanted = plain(answer)
    accepted = [wanted, wanted[0]] if wrapped else [wanted]
    written = ", ".join(repr(plain(argument)) for argument in arguments)
    code = f"_seen(0, getattr(Solution() if 'Solution' in globals() else __import__('solution'), {name!r})({written}))"

    def is_accepted(value: Any, _: None, tolerance: float) -> bool:
        return any(same_value(plain(value), one, tolerance) for one in accepted)

    return Check(code, (Expectation(is_accepted, None, always=True),), frozenset({name}))


def is_wrapped(answers: Sequence[Any]) -> bool:
    """Return whether every answer of a row is a list of one, as in APPS. Where such lists were the answers themselves,
    some answer of the row would be no such list.
    """
    return all(isinstance(answer, tuple | list) and len(answer) == 1 for answer in answers)


def plain(value: Any) -> Any:
    """Return `value` as JSON has it: tuples as lists, keys as texts. ValueError for what JSON does not have."""
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
    raise ValueError(f"{type(value).__name__} is no plain value")
