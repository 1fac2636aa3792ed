r"""The final answer of a text.

What follows `</think>` is looked at alone. In it, in this order: the last `\boxed{...}` (boxes joined by "and",
"or" or a comma are one list); what follows the last `####`, `<answer>` or "the answer is"; the last formula, where
no number follows it; the last number, or the last line where the answer sought is no number.

Every pattern here takes time in proportion to the text.
"""

import re

MAX_TEXT = 20_000  # characters looked at, from the end: the answer is there

# A number as people write it: 72  -3  1,234.50  3/4  .5  50%
_NUMBER = re.compile(
    r"""
    (?:(?<![\w)\]}])[-+−–])?                              # after a digit or bracket it subtracts
    (?:\\?\$)?                                           # a price
    (?:\d{1,3}(?:[ ,]\d{3})+(?![\d])|\d+)?               # with thousands separators or without
    (?:(?<![\d.])\.\d+|(?<=\d)(?:\.\d+)?)                # decimals; there is a digit before or after the point
    (?:/\d+|\ \d+/\d+)?                                  # a quotient, a mixed number
    (?:\s?\\?%)?
    """,
    re.ASCII | re.VERBOSE,
)
_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_JOINT = re.compile(r"[\s$.]*(?:,|,?\s*(?:\\text\{\s*)?(?:and|or)(?:\s*\})?)[\s$]*")
_FORMULA = re.compile(
    r"\$\$([^$]{1,2000})\$\$|\$([^$\n]{1,2000})\$"
    r"|\\\[((?:(?!\\\[).){1,2000}?)\\\]|\\\(((?:(?!\\\().){1,2000}?)\\\)",
    re.DOTALL,
)
_PROSE = re.compile(r"(?<![A-Za-z\\{])(?!(?:and|or)\b)[A-Za-z]{3,}(?![A-Za-z}])|(?<!\\)<<")
_MARK = re.compile(
    r"""
    \#\#\#\#
    | <answer>
    | \b(?:answer|(?:correct|right)\ (?:option|choice)|option)(?:\s+is)?\**\s*(?:=|:|(?<=\sis))\**
    """,
    re.VERBOSE | re.IGNORECASE,
)
# what ends an answer that is given in a sentence: the next tag, the next sentence, or a reason
_END = re.compile(r"</?\w|<\||\n|\.\s+[A-Z]|\.?\**\s*$|,?\s+(?:because|since|as|so|not|which|where)\s")


def final_answer(text: str, numeric: bool = True) -> str | None:
    """Return the final answer of `text`, None where it has none; `numeric`: a number is sought."""
    text = text[-MAX_TEXT:]
    _, thought, text = text.rpartition("</think>")
    if not thought and "<think>" in text:  # cut off while it was thinking
        return None
    box = _BOX.search(text)
    if box:
        return boxed(text)
    marks = list(_MARK.finditer(text))
    if marks:
        return _marked(text[marks[-1].end() :], numeric)
    return _unmarked(text, numeric)


def boxed(text: str) -> str | None:
    """Return the inside of the last box, joined to the boxes before it that it is in one list with."""
    inside: list[str] = []
    following = len(text)  # where the box after this one begins
    for box in reversed(list(_BOX.finditer(text))):
        begin, end = box.end(), _end_of_group(text, box.end())
        if end is None or (inside and not _JOINT.fullmatch(text, end, following)):
            break
        following = box.start()
        inside.insert(0, text[begin + 1 : end - 1] if text[begin] == "{" else text[begin:end])
    return ", ".join(inside) if inside else None


def _end_of_group(text: str, begin: int) -> int | None:
    """Return the end of the braces that open at `begin`, or of a word without braces; None where they stay open."""
    if begin >= len(text):
        return None
    if text[begin] != "{":
        word = re.compile(r"[^\s{}$]+").match(text, begin)
        return word.end() if word else None
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end()
    return None


def _marked(tail: str, numeric: bool) -> str | None:
    tail = tail.strip().lstrip("*").lstrip()
    formula = _FORMULA.match(tail)
    if formula:
        return next(filter(None, formula.groups()))
    end = _END.search(tail)
    line = tail[: end.start()] if end else tail
    if not numeric:
        return line or None
    numbers = _numbers(line.rpartition("=")[2])
    return numbers[0] if numbers and _PROSE.search(line) else (line if numbers else None)


def _unmarked(text: str, numeric: bool) -> str | None:
    formulas = [match for match in _FORMULA.finditer(text) if not _PROSE.search(match[0])]
    if formulas and not _numbers(text[formulas[-1].end() :]):
        last = len(formulas) - 1
        while last and _JOINT.fullmatch(text, formulas[last - 1].end(), formulas[last].start()):
            last -= 1
        return ", ".join(next(filter(None, match.groups())) for match in formulas[last:])
    lines = text.strip().splitlines()
    if lines and re.search(r"\\[A-Za-z]", lines[-1]) and not _PROSE.search(lines[-1]):
        return lines[-1]
    numbers = _numbers(text)
    if numeric or numbers[-1:] == [text.strip()]:
        return numbers[-1] if numbers else None
    return lines[-1] if lines else None


def _numbers(text: str) -> list[str]:
    return [number for number in _NUMBER.findall(text) if number.strip("$+-")]
