r"""Extraction of the final answer from a mathematical text.

Only text after `</think>` is searched. The final answer is the first of these that the text has:

- the last `\boxed{...}`; boxes joined by "and", "or" or a comma are one list
- the text after the last `####`, `<answer>` or "the answer is"
- the last formula, if no number follows it
- the last number, or the last line if the answer is not numeric

Every pattern takes time linear in the text.
"""

import re

MAX_TEXT = 20_000  # only the last characters are searched

# numbers such as 72  -3  1,234.50  3/4  .5  50%
_NUMBER = re.compile(
    r"""
    (?:(?<![\w)\]}])[-+−–])?                              # sign, unless after a digit or bracket
    (?:\\?\$)?                                           # currency
    (?:\d{1,3}(?:[ ,]\d{3})+(?![\d])|\d+)?               # digits, optional thousands separators
    (?:(?<![\d.])\.\d+|(?<=\d)(?:\.\d+)?)                # decimals
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
# end of an answer within a sentence: a tag, the next sentence, or a reason
_END = re.compile(r"</?\w|<\||\n|\.\s+[A-Z]|\.?\**\s*$|,?\s+(?:because|since|as|so|not|which|where)\s")


def final_answer(text: str, numeric: bool = True) -> str | None:
    """Return the final answer of a text; None if the text has no answer.

    Args:
        numeric: whether the answer is known to be a number.
    """
    text = text[-MAX_TEXT:]
    _, thought, text = text.rpartition("</think>")
    if not thought and "<think>" in text:  # truncated within the thought
        return None
    box = _BOX.search(text)
    if box:
        return boxed(text)
    marks = list(_MARK.finditer(text))
    if marks:
        return _marked(text[marks[-1].end() :], numeric)
    return _unmarked(text, numeric)


def boxed(text: str) -> str | None:
    """Return the content of the last box; None if the last box is not closed.

    Boxes before it belong to the same list if they are joined to it by "and", "or" or a comma. Their content is
    returned too, separated by commas.
    """
    inside: list[str] = []
    following = len(text)  # start of the next box
    for box in reversed(list(_BOX.finditer(text))):
        begin, end = box.end(), _end_of_group(text, box.end())
        if end is None or (inside and not _JOINT.fullmatch(text, end, following)):
            break
        following = box.start()
        inside.insert(0, text[begin + 1 : end - 1] if text[begin] == "{" else text[begin:end])
    return ", ".join(inside) if inside else None


def _end_of_group(text: str, begin: int) -> int | None:
    """Return the end of the brace group or of the word at position `begin`; None if a brace is not closed."""
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
