r"""Structure of an answer: members of a list, coordinates of a point, values by name."""

import re
from collections.abc import Sequence

_OPEN = ("(", "[", "{", "\\{")
_BRACKET = re.compile(r"\\[{}]|[()\[\]{}]")
_COMMA = re.compile(r",?\s*(?<![A-Za-z])(?:and|or)(?![A-Za-z])|[,;]")
NAME = re.compile(
    r"\(?\s*\\?[A-Za-z]{1,12}(?:_\{?\w{1,3}\}?)?'?(?:\s*,\s*[A-Za-z](?:_\{?\w\}?)?)*\s*\)?(?:\([a-z, ]{1,9}\))?"
)


def assigned(members: Sequence[str]) -> dict[str, str] | None:
    """Parse "x=1, y=2" to name -> value, sorted by name; None for other texts and for x_1=1, x_2=2."""
    if len(members) == 1 and len(members[0].split("=")) == 2:  # (x,y) = (1,2)
        names, values = (point_of([side.strip()]) or [] for side in members[0].split("="))
        if len(names) == len(values) and all(map(NAME.fullmatch, names)):
            return dict(sorted(zip(names, values, strict=True))) or None
    if len(members) < 2:
        return None
    sides = [member.split("=") for member in members]
    if not all(len(side) == 2 and NAME.fullmatch(side[0].strip()) for side in sides):
        return None
    named = {name.strip(): value.strip() for name, value in sides}
    bare = {name.partition("_")[0] for name in named}
    return dict(sorted(named.items())) if len(bare) == len(members) else None


def members_of(text: str) -> list[str]:
    r"""Return the members of a list, a set in braces or a +-; otherwise the text as the only member."""
    text = text.strip()
    inside = brackets_inside(text)
    while inside is not None and text.startswith("(") and len(split_outside(inside, _COMMA)) == 1:
        text = inside.strip()
        inside = brackets_inside(text)
    if inside is not None and text.startswith(("\\{", "{")) and inside.strip() not in ("", "\\emptyset"):
        text = inside
    members = [part for whole in split_outside(text, _COMMA) for part in _both_signs(whole.strip())]
    return members if all(members) else [text]


def _both_signs(text: str) -> list[str]:
    name = ""
    if "\\pm" in text and "=" in text:
        name, _, text = text.rpartition("=")
        name += "="
    if text.count("\\pm") == 1:
        return [name + text.replace("\\pm", "+").replace("\\mp", "-").strip().removeprefix("+"),
                name + text.replace("\\pm", "-").replace("\\mp", "+")]  # fmt: skip
    return [name + text]


def point_of(members: Sequence[str]) -> list[str] | None:
    """Return the coordinates of a single point such as (1, 2) or [0, 1); None for others."""
    if len(members) != 1:
        return None
    inside = brackets_inside(members[0].strip())
    if inside is None or not members[0].strip().startswith(("(", "[")):
        return None
    coordinates = split_outside(inside, re.compile(r"[,;]"))
    return [part.strip() for part in coordinates] if len(coordinates) > 1 else None


def brackets_inside(text: str) -> str | None:
    """Return the content of brackets of any kind around the whole text; None without them."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    if opening not in ("(", "[", "\\{", "{"):
        return None
    closing = ("\\}",) if opening == "\\{" else ("}",) if opening == "{" else (")", "]")
    if not text.endswith(closing):
        return None
    closing_length = 2 if opening == "\\{" else 1
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += _step(bracket[0])
        if depth <= 0:
            return text[len(opening) : -closing_length] if bracket.end() == len(text) else None
    return None


def _step(bracket: str) -> int:
    if bracket in _OPEN:
        return 1
    return -1


def split_outside(text: str, separator: "re.Pattern[str]") -> list[str]:
    """Split a text at separators outside of brackets."""
    parts, depth, at = [], 0, 0
    pattern = re.compile(f"(?P<bracket>{_BRACKET.pattern})|(?P<cut>{separator.pattern})")
    for token in pattern.finditer(text):
        if token["bracket"]:
            depth += _step(token[0])
        elif depth == 0:
            parts.append(text[at : token.start()])
            at = token.end()
    return [*parts, text[at:]]
