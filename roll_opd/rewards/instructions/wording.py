"""Counts words and sentences by rules that are written here, in time linear in the text."""

import re
from collections.abc import Iterator

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"[^\W_]+(?:[.'’_-][^\W_]+)*")  # a hyphenated word, and a contraction, is one
# points that may end a sentence, with closing quotes and brackets; a Chinese or Japanese one needs no space after it
_POINT = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’)\]*_]*(?=\s|\Z)|[。！？]+[”’」』）]*")
_BEFORE_POINT = re.compile(r"[^\s(\[\"'“‘]{1,20}\Z")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t]{0,8}(?:\d{1,3}|[A-Za-z])\Z")
_LOOK_BACK = 24  # characters; no abbreviation is longer
# never the end of a sentence
_TITLES = frozenset("mr mrs ms dr prof st mt gen sen rep lt col capt vs fig cf e.g i.e approx".split())  # noqa: SIM905
# the end of a sentence where a capital letter follows
_SHORTENED = frozenset("etc al inc ltd co corp jr sr est dept vol ave".split())  # noqa: SIM905


def count_words(text: str) -> int:
    r"""Runs of letters, digits and underscores (`\w+`): IFEval's count, in which "don't" is two."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Words whose letters are all capitals: "NASA", "COVID-19", "I", "U.S."."""
    return sum(token[0].isupper() for token in _TOKEN.finditer(text))


def count_sentences(text: str) -> int:
    """Sentences end at `.`, `!`, `?` or `…` before a space, or at `。！？`; a rest without a point is one more.

    No sentence ends after a title or initial ("Dr. A. Smith"), after "e.g.", after the number of a list's item, or
    after another abbreviation ("U.S.", "etc."), an ellipsis or a closing quote that a small letter follows. Line breaks
    end none.
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
    goes_on = text[after : after + 8].lstrip()[:1].islower()
    mark = text[point:after]
    if mark[0] in "。！？" or mark in ("!", "?"):
        return True
    if mark != ".":  # with a closing quote or bracket, or an ellipsis
        return not goes_on
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
        return not goes_on
    return True
