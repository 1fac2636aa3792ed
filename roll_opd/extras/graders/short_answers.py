r"""Extraction and normalisation of final answers.

The final answer is in the last `\boxed{...}`, or else after "the answer is", or else in the last line.

Every function takes time linear in its text.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Collection
from typing import Literal

from roll_opd.data.row_formats import number_text

MAX_MARKS = 50  # number of last announcements that are searched; a text with more repeats itself
REACH = 300  # characters searched after a mark or in a last line

_BRACE = re.compile(r"\\f?box(?:ed)?\s{0,3}\{|\\[{}]|[{}]")
_MARK = re.compile(
    r"""
    \b(?:answer|choice|option)s?\b [^\n.:：]{0,40}? (?: \b(?:is|are|be)\b | [:：=] )  # the best answer would be
    | (?:答案|选项|选择?)\s{0,3}(?:应该|应)?(?:是|为|選|选)?\s{0,3}[:：]?
    | <answer>
    """,
    re.IGNORECASE | re.VERBOSE,
)
_DECORATION = re.compile(
    r"\\(?:text|math|bold)[a-z]{0,10}(?![a-z])|\\(?:bf|rm|it|sf|tt)\b|\\?[{}]|\\[,;:!()\[\] ]|</?answer>|[$*`]|__"
)
# kept signs: minus and decimal point of a number, and signs of quantity
_SIGN = re.compile(
    r"""
    (?P<kept>(?<!\w)-(?=\.?\d)|\.(?=\d)|[%€£°+=<>/^\\])
    | (?P<dropped>(?<=\d),(?=\d{3})|[.'’])  # in the middle of a word
    | [^\w\s]|_
    """,
    re.VERBOSE,
)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>` and before an unclosed `<think>`."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` with balanced braces; None if there is none.

    `\fbox` and `\box` count too.
    """
    opened: list[tuple[int, int]] = []  # (start of the command or -1 for a bare brace, start of its content)
    start, inside = -1, None
    for brace in _BRACE.finditer(text):
        if brace[0] == "}":
            if not opened:
                continue
            command, begin = opened.pop()
            if command > start:
                start, inside = command, (begin, brace.start())
        elif brace[0] not in (r"\{", r"\}"):
            opened.append((brace.start() if brace[0] != "{" else -1, brace.end()))
    return None if inside is None else text[slice(*inside)].strip()


def announced(text: str) -> list[str]:
    """Return the text after each announcement of an answer, up to the end of the line.

    An announcement is "the answer is", "Answer:", "答案是" or `<answer>`. The last one of the text comes first.
    """
    marks = [mark.end() for mark in _MARK.finditer(text)][-MAX_MARKS:]
    tails = [text[end : end + REACH].lstrip() for end in reversed(marks)]
    return [tail.partition("\n")[0].partition("</answer>")[0].strip() for tail in tails]


def last_line(text: str) -> str:
    """Return the last line of `text` that is not blank; "" if there is none.

    If the line is long, only its end is returned.
    """
    return text.rstrip().rpartition("\n")[2].strip()[-REACH:]


def final_answer(text: str) -> str:
    """Return the final answer of `text`; "" if there is none."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    return next(filter(None, announced(text)), "") or last_line(text)


def undecorated(text: str) -> str:
    r"""Return `text` without decoration.

    The decoration is Markdown's asterisks, and the dollar signs, braces and font commands of LaTeX, such as `\text`.
    """
    return _DECORATION.sub("", text).strip()


def without_punctuation(text: str) -> str:
    """Return `text` without punctuation.

    Signs that belong to a number are kept: -5, 1.5 and 50% stay unchanged. Thousands separators are removed: 1,000
    becomes 1000.
    """
    return _SIGN.sub(lambda sign: sign["kept"] or ("" if sign["dropped"] else " "), text)


Normalization = Literal["width", "case", "punctuation", "articles", "spaces"]
NORMALIZATIONS: dict[Normalization, Callable[[str], str]] = {
    "width": lambda text: unicodedata.normalize("NFKC", text),
    "case": str.casefold,
    "punctuation": without_punctuation,
    "articles": lambda text: _ARTICLE.sub(" ", text),
    "spaces": lambda text: " ".join(text.split()),
}


def normalized(text: str, how: Collection[Normalization] = tuple(NORMALIZATIONS)) -> str:
    """Return `text` after some normalisations, applied in the order of `NORMALIZATIONS`.

    Args:
        how: names of the normalisations.
    """
    for name, normalize in NORMALIZATIONS.items():
        if name in how:
            text = normalize(text)
    return text


def same_text(one: str, other: str) -> bool:
    """Return whether two answers are equal after normalisation.

    Decoration of Markdown and LaTeX, case, articles and punctuation are ignored.
    """
    one, other = (normalized(undecorated(text)) for text in (one, other))
    return bool(one) and one == other


def several(ground_truth: str) -> tuple[str, ...]:
    """Return the accepted answers of a ground truth.

    They are the entries of a JSON list, or else the text itself.
    """
    if ground_truth.lstrip().startswith("["):
        try:
            listed = json.loads(ground_truth)
        except (ValueError, RecursionError):
            return (ground_truth,)
        if listed and all(isinstance(answer, str | int | float) for answer in listed):
            return tuple(answer if isinstance(answer, str) else number_text(answer) for answer in listed)
    return (ground_truth,)
