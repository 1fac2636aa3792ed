"""Escape text from models and users.

The escaped text can be displayed and embedded in HTML.
"""

import json
import unicodedata
from typing import Any

INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, bidi and zero-width characters, surrogates, line separators
LITERAL = {"\n", "\t"}
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}  # so that a script element contains no tag or comment


def visible(text: str) -> str:
    """Return `text` with code points in place of invisible characters, for example `⟨U+202E⟩`.

    Characters that change the text direction are replaced too.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def limited(value: Any, most: int = 300) -> str:
    """Return a value as `visible` text; "" for None.

    Text of more than `most` characters is shortened in the middle.
    """
    text = "" if value is None else str(value)
    if len(text) > most:
        text = f"{text[: most // 2]} … {len(text) - most} characters … {text[-most // 2 :]}"
    return visible(text)


def _shown(character: str) -> str:
    if character in LITERAL or unicodedata.category(character) not in INVISIBLE:
        return character
    return f"⟨U+{ord(character):04X}⟩"


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a `<script>` element.

    The JSON is ASCII and contains no `<`, `>` or `&`. Raises `ValueError` if a number is not finite.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text


def rounded(value: float, digits: int) -> float | int:
    """Return `value` rounded to `digits` significant digits.

    An integral result is returned as an int, because its text is shorter.
    """
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
