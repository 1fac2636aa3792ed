r"""Units of answers, such as "12 cm", "5 miles per hour", "\$18" and "72 clips".

The question usually names the unit. An answer without a unit therefore gets the unit of the other answer. Units of the
same dimension are converted: 3 m = 300 cm. Unknown words for units must be equal.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

# kind: {name: size}; a name is lower case and singular, or a symbol with its usual case
_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "mm millimeter millimetre": "1/1000",
        "cm centimeter centimetre": "1/100",
        "m meter metre": "1",
        "km kilometer kilometre": "1000",
        "in inch inche": "0.0254",
        "ft foot feet": "0.3048",
        "yd yard": "0.9144",
        "mi mile": "1609.344",
    },
    "time": {
        "ms millisecond": "1/1000",
        "s sec second": "1",
        "min minute": "60",
        "h hr hour": "3600",
        "day": "86400",
        "week": "604800",
    },
    "years": {"month": "1/12", "yr year": "1"},
    "mass": {"mg milligram": "1/1000000", "g gram": "1/1000", "kg kilogram": "1", "ton tonne": "1000"},
    "weight": {"oz ounce": "1/16", "lb pound": "1"},
    "volume": {"ml mL milliliter millilitre": "1/1000", "l L liter litre": "1"},
    "money": {"cent": "1/100", "$ usd buck dollar": "1"},
    "euro": {"€ eur euro": "1"},
    "sterling": {"£ gbp": "1"},
    "force": {"N newton": "1", "kN": "1000"},
    "energy": {"J joule": "1", "kJ": "1000"},
    "power": {"W watt": "1", "kW": "1000"},
    "charge": {"C coulomb": "1"},
    "voltage": {"V volt": "1"},
    "temperature": {"K kelvin": "1"},
    "frequency": {"Hz hertz": "1"},
}
_UNITS = {
    name: (kind, Fraction(size))
    for kind, units in _TABLE.items()
    for names, size in units.items()
    for name in names.split()
}
_KMH = [("km", 1), ("h", -1)]
_SHORT = {"mph": [("mile", 1), ("h", -1)], "kmph": _KMH, "kph": _KMH, "kmh": _KMH, "cc": [("cm", 3)]}
_NO_UNIT = {"unit", "of", "in", "total", "a", "the"}  # words without meaning as a unit
_NOT_UNITS = {"or", "and", "mod", "choose", "to", "pi", "if", "where", "for", "times", "over", "plus", "minus", "is",
              "no", "not", "sin", "cos", "tan", "log", "exp", "sqrt", "cot", "csc", "half"}  # fmt: skip

_PREFIX = re.compile(r"(-?)\s*(\\?\$|€|£|US\\?\$|USD)\s*(?=[-\d.\\({])")
_TAIL = re.compile(
    r"""
    (?:(?<=[\d)}\]!])|(?<=\\pi))(?P<space>\s*)
    (?P<unit> \^\\circ\s*[A-Za-z]{0,12}
            | (?:\\?\$|[€£])(?:\s*(?:per|/)\s*[A-Za-z\s]{1,20})?
            | \\frac\{\s*[A-Za-z]{1,20}\s*\}\{\s*[A-Za-z]{1,20}\s*\}
            | /?\s?[A-Za-z](?:[A-Za-z\s.'()/]|\^\{?-?\d\}?){0,60}
    )\s*$
    """,
    re.VERBOSE,
)
_WORDS = re.compile(r"[A-Za-z$€£]+|/|\^-?\d")


@dataclass(frozen=True)
class PhysicalUnit:
    """A physical unit.

    `kinds` has pairs of a dimension and its exponent, such as ("length", 2) for an area. It is None if the words of the
    unit are unknown. `size` is the unit's size in base units.
    """

    words: frozenset[str]
    kinds: frozenset[tuple[str, int]] | None = None
    size: Fraction = Fraction(1)


def split_unit(text: str) -> tuple[str, PhysicalUnit | None]:
    """Return (value, unit) of an answer; the unit is None if it is missing or has no meaning."""
    prefix = _PREFIX.match(text)
    if prefix:  # "$3 per hour" is "3 $ per hour"
        value = prefix[1] + text[prefix.end() :]
        tail = _TAIL.search(value)
        at = tail.start() if tail else len(value)
        currency = "$" if prefix[2][-1] in "$D" else prefix[2]
        text = f"{value[:at]} {currency} {value[at:]}"
    tail = _TAIL.search(text)
    if tail is None:
        return text, None
    value, written = text[: tail.start()].strip(), tail["unit"]
    unit = _unit(written)
    if unit is None or not _can_have(value, written, unit, bool(tail["space"]) or value.endswith(("}", ")"))):
        return text, None
    return value, unit if unit.words else None


def _can_have(value: str, written: str, unit: PhysicalUnit, apart: bool) -> bool:
    """Return whether the text after a value is the unit of the value, and not the rest of a formula.

    Args:
        written: the text after the value.
        unit: the text, parsed as a unit.
        apart: whether a space or a closing bracket separates the text from the number.
    """
    if written.startswith(("$", "\\$", "€", "£")):
        return True
    if written.startswith("^\\circ"):
        return re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", value) is None
    if re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", value)):  # 5x cm
        return False
    if not re.search(r"\d", value):  # \pi hr^2
        return all(len(word) > 2 for word in unit.words)
    return apart if len(written) == 1 or unit.kinds is None else True


def conversion(one: PhysicalUnit | None, other: PhysicalUnit | None) -> Fraction | None:
    """Return the factor that converts unit `one` to unit `other`.

    The result is None if the units are incompatible, and 1 if one of them is missing.
    """
    if one is None or other is None:
        return Fraction(1)
    if one.kinds is not None and other.kinds is not None:
        return one.size / other.size if one.kinds == other.kinds else None
    return Fraction(1) if one.words <= other.words or other.words <= one.words else None


def _unit(text: str) -> PhysicalUnit | None:
    """Parse a unit; return None if the text is part of a formula."""
    text = re.sub(r"\\frac\{(.*?)\}\{(.*?)\}", r"\1/\2", text).replace("\\circ", "degree").replace("^{", "^")
    text = re.sub(r"\^degree", "degree ", text.replace("}", "").replace(".", ""))
    powers: Counter[tuple[str, int]] = Counter()
    names: list[tuple[str, int]] = []
    sign, power = 1, 1  # sign and power of the next word
    tokens = _WORDS.findall(text)
    for token in tokens:
        word = token if token in _UNITS else token.lower()
        if word in ("per", "/"):
            sign = -1
        elif word in ("square", "sq", "cubic", "cu"):
            power = 3 if word.startswith("cu") else 2
        elif word in ("squared", "cubed") or word.startswith("^"):
            if not names:
                return None
            raised = {"squared": 2, "cubed": 3}.get(word) or int(word[1:])
            names[-1] = (names[-1][0], names[-1][1] * raised)
        elif word in _SHORT:
            names += _SHORT[word]
        elif word in _NOT_UNITS:
            return None
        else:
            names.append((_singular(word), sign * power))
            sign, power = 1, 1
    names = [(name, power) for name, power in names if name not in _NO_UNIT or (name == "in" and len(tokens) == 1)]
    if any(name == "degree" for name, _ in names):
        names = [({"C": "celsius", "f": "fahrenheit"}.get(name, name), power) for name, power in names]
    words = frozenset(name for name, _ in names)
    if all(name in _UNITS for name, _ in names):
        size = Fraction(1)
        for name, exponent in names:
            kind, one = _UNITS[name]
            powers[kind, 0] += exponent
            size *= one**exponent
        return PhysicalUnit(words, frozenset((kind, exponent) for (kind, _), exponent in powers.items()), size)
    if "degree" not in words and any(len(name) < 3 for name, _ in names if name not in _UNITS):
        return None
    return PhysicalUnit(words)


def _singular(word: str) -> str:
    if word in _UNITS:
        return word
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith(("ss", "us")) else word
