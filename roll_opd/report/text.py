"""Text that a model or a user wrote, made safe to look at and to embed."""

import json
import unicodedata
from typing import Any

UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, bidi and zero-width characters, half pairs, line separators
AS_THEY_ARE = {"\n", "\t"}
CLOSING = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}  # nothing in a script may look like a tag or a comment


def visible(text: str) -> str:
    """Return `text` with every character that nobody would see, or that moves its neighbours, as `⟨U+202E⟩`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def limited(value: Any, most: int = 300) -> str:
    """Return the text of any value, `visible`, without the middle of more than `most` characters; of None nothing."""
    text = "" if value is None else str(value)
    if len(text) > most:
        text = f"{text[: most // 2]} … {len(text) - most} characters … {text[-most // 2 :]}"
    return visible(text)


def _shown(character: str) -> str:
    if character in AS_THEY_ARE or unicodedata.category(character) not in UNSEEN:
        return character
    return f"⟨U+{ord(character):04X}⟩"


def script_json(value: Any) -> str:
    """Return strict JSON that can stand inside a `<script>` element: plain ASCII, without `<`, `>` and `&`.

    Raises `ValueError` for a number that is not finite.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character, escape in CLOSING.items():
        text = text.replace(character, escape)
    return text


def rounded(value: float, digits: int) -> float | int:
    """Return `value` with so many significant digits, as an int where that is one (it is shorter)."""
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
