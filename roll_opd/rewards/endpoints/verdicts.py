"""From what a judge wrote to a number: its last verdict, as JSON or by a pattern, scaled to 0..1.

The last one, because a judge that thinks aloud quotes others first, those in the answer it reads included.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_opd.base.frozen import FrozenDict

MAX_TEXT = 20_000  # characters looked at, from the end: the verdict is there
WORDS = {"yes": True, "true": True, "correct": True, "no": False, "false": False, "incorrect": False}

# YES or NO anywhere; in small letters only as the first word, because "there is no error" is no verdict
YES_OR_NO = r"\b(YES|NO)\b|\A\W*((?i:yes|no))\b"


@dataclass(frozen=True)
class Verdict:
    value: float  # 0..1
    parts: Mapping[str, float] = field(default_factory=FrozenDict)  # of a verdict with several keys, 0..1 each


ReadVerdict = Callable[[str], Verdict | None]  # None: there is none


def by_pattern(pattern: re.Pattern[str], low: float, high: float) -> ReadVerdict:
    """Read the last match: its first group that matched, or all of it; a number, or a word such as YES."""

    def read(text: str) -> Verdict | None:
        matches = list(pattern.finditer(_said(text)))
        if not matches:
            return None
        last = matches[-1]
        value = _scaled(next((group for group in last.groups() if group is not None), last[0]), low, high)
        return None if value is None else Verdict(value)

    return read


def by_json(keys: Sequence[str], low: float, high: float) -> ReadVerdict:
    """Read the last JSON object that has all `keys`; of several keys the mean counts, and each is a part."""

    def read(text: str) -> Verdict | None:
        found = None
        for candidate in _objects(_said(text)):
            if all(key in candidate for key in keys):
                found = candidate
        if found is None:
            return None
        values = {key: _scaled(found[key], low, high) for key in keys}
        numbers = [value for value in values.values() if value is not None]
        if len(numbers) < len(keys):
            return None
        return Verdict(sum(numbers) / len(numbers), FrozenDict(values if len(keys) > 1 else {}))

    return read


def _said(text: str) -> str:
    """Return the text after the judge's thinking; nothing where the text ends within it."""
    _, end, said = text.rpartition("</think>")
    if not end and "<think>" in said:
        return ""
    return said[-MAX_TEXT:]


def _scaled(written: Any, low: float, high: float) -> float | None:
    """Return `written` from low..high to 0..1; None where it is no number between them and no word of `WORDS`."""
    if isinstance(written, str):
        written = WORDS.get(written.strip().lower(), written)
    if isinstance(written, bool):
        return float(written)
    try:
        number = float(written)
    except (TypeError, ValueError, OverflowError):
        return None
    if not math.isfinite(number) or not low <= number <= high:
        return None
    return (number - low) / (high - low)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, in order; not those inside of another one."""
    decoder = json.JSONDecoder()
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
            yield value
        except (ValueError, RecursionError):
            end = position + 1
        position = text.find("{", end)
