"""Counts of words, capital words and sentences, in time linear in the text."""

import re
from collections.abc import Iterator

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"[^\W_]+(?:[.'’_-][^\W_]+)*")  # hyphenated words and contractions count as one
# end marks of sentences with closing quotes and brackets; Chinese and Japanese ones need no space
_POINT = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’)\]*_]*(?=\s|\Z)|[。！？]+[”’」』）]*")
_BEFORE_POINT = re.compile(r"[^\s(\[\"'“‘]{1,20}\Z")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t]{0,8}(?:\d{1,3}|[A-Za-z])\Z")
_LOOK_BACK = 24  # characters; no abbreviation is longer
# abbreviations that never end a sentence
_TITLES = frozenset("mr mrs ms dr prof st mt gen sen rep lt col capt vs fig cf e.g i.e approx".split())  # noqa: SIM905
# abbreviations that end a sentence before a capital letter
_SHORTENED = frozenset("etc al inc ltd co corp jr sr est dept vol ave".split())  # noqa: SIM905


def count_words(text: str) -> int:
    r"""Count runs of letters, digits and underscores (`\w+`), IFEval's count; "don't" counts as two."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Count words with only capital letters: "NASA", "COVID-19", "I", "U.S."."""
    return sum(token[0].isupper() for token in _TOKEN.finditer(text))


def count_sentences(text: str) -> int:
    """Count sentences, which end at `.`, `!`, `?` or `…` before a space, at `。！？`, or at the end of the text.

    No sentence ends after a title or initial ("Dr. A. Smith"), "e.g.", the number of a list item, or before a
    lower-case letter after another abbreviation ("U.S.", "etc."), an ellipsis or a closing quote. Line breaks do not
    end sentences.
    """
    return sum(any(map(str.isalnum, sentence)) for sentence in _sentences(text))


def _sentences(text: str) -> Iterator[str]:
    start, text = 0, text.rstrip()
    for point in _POINT.finditer(text):
        if _ends_a_sentence(text, point.start(), point.end()):
            yield text[start : point.end()]
            start = point.end()
    yield text[start:]


def _ends_a_sentence(text: str, point: int, after: int) -> bool:
    continues = text[after : after + 8].lstrip()[:1].islower()
    mark = text[point:after]
    if mark[0] in "。！？" or mark in ("!", "?"):
        return True
    if mark != ".":  # with a closing quote or bracket, or an ellipsis
        return not continues
    before = text[max(0, point - _LOOK_BACK) : point]
    if _LIST_NUMBER.search(before if point <= _LOOK_BACK else "x" + before):
        return False
    word = _BEFORE_POINT.search(before)
    if word is None or after == len(text):
        return True
    last = word[0].lower()
    if last in _TITLES or (len(last) == 1 and word[0].isupper() and last != "i"):
        return False
    if last in _SHORTENED or re.fullmatch(r"(?:[a-z]\.)+[a-z]", last):
        return not continues
    return True
