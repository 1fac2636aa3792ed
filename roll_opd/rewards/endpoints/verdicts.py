"""Parsers of a judge's verdict: the last JSON object or pattern match, scaled to 0..1.

The last one counts, because a judge may quote other verdicts first, including those in the graded response.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_opd.base.frozen import FrozenDict

MAX_TEXT = 20_000  # only the last characters are searched
WORDS = {"yes": True, "true": True, "correct": True, "no": False, "false": False, "incorrect": False}

# YES or NO anywhere; lower case only as the first word, because "there is no error" is not a verdict
YES_OR_NO = r"\b(YES|NO)\b|\A\W*((?i:yes|no))\b"


@dataclass(frozen=True)
class Verdict:
    value: float  # 0..1
    parts: Mapping[str, float] = field(default_factory=FrozenDict)  # per key if there are several, 0..1 each


ReadVerdict = Callable[[str], Verdict | None]  # None: no verdict found


def by_pattern(pattern: re.Pattern[str], low: float, high: float) -> ReadVerdict:
    """Return a parser of the last match, by its first group or in full: a number, or a word such as YES."""

    def read(text: str) -> Verdict | None:
        matches = list(pattern.finditer(_without_thought(text)))
        if not matches:
            return None
        last = matches[-1]
        value = _scaled(next((group for group in last.groups() if group is not None), last[0]), low, high)
        return None if value is None else Verdict(value)

    return read


def by_json(keys: Sequence[str], low: float, high: float) -> ReadVerdict:
    """Return a parser of the last JSON object with all `keys`; the value is their mean, each is a part."""

    def read(text: str) -> Verdict | None:
        found = None
        for candidate in _objects(_without_thought(text)):
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


def _without_thought(text: str) -> str:
    """Return the text after the judge's thought; empty if the thought is unfinished."""
    _, end, answer = text.rpartition("</think>")
    if not end and "<think>" in answer:
        return ""
    return answer[-MAX_TEXT:]


def _scaled(written: Any, low: float, high: float) -> float | None:
    """Scale a number in low..high, or a word of `WORDS`, to 0..1; None for other values."""
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
    """Yield the top-level JSON objects in a text, in order."""
    decoder = json.JSONDecoder()
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
            yield value
        except (ValueError, RecursionError):
            end = position + 1
        position = text.find("{", end)
