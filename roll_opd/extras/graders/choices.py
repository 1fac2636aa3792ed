"""Parse the options that a multiple-choice answer chooses: "B", "(B)", "B. Paris", "A and C", or the text of an option.

A letter counts only if it is a separate word. "A" and "I" before a word are an article and a pronoun. "A or B" is not
an answer. A lower-case letter counts only in brackets or before punctuation.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.extras.graders import short_answers

_LEAD = re.compile(
    r"[\s:：=\-\"'“”‘’.>]{0,9}(?:(?:the\s)?(?:correct\s|right\s|best\s)?(?:option|choice|letter|answer|选项|选)[s是为]?\s{0,3}"
    r"(?:is\s|are\s)?[:：]?\s{0,3})?[\"'“‘]?",
    re.IGNORECASE,
)
_OPEN, _CLOSE = r"[(\[（【<]", r"[)\]）】>]"
_ALONE = r"(?![A-Za-z0-9_]|['’\-+][A-Za-z0-9]|\+\+|\#)"
_LETTERS = re.compile(rf"(?P<open>{_OPEN}\s{{0,3}})?(?P<letters>[A-Z]{{1,10}}){_ALONE}(?:\s{{0,3}}{_CLOSE})?")
_SMALL = re.compile(rf"{_OPEN}\s{{0,3}}([a-z])\s{{0,3}}{_CLOSE}|([a-z])(?=\s{{0,3}}(?:[).:,;\]](?![A-Za-z])|\n|\Z))")
_AND = re.compile(r"\s{0,3}(?:(?:[,，、;；&]|\band\b|和|与|及)\s{0,3}){1,2}(?:options?\s)?")
_OR = re.compile(rf"\s{{0,3}},?\s{{0,3}}(?:\bor\b|或者?|/)\s{{0,3}}(?:options?\s)?{_OPEN}?[A-Z]{_ALONE}")
_SPACED = re.compile(r"[A-Z](?:\s[A-Z]){1,9}")
_WORD_AFTER = re.compile(r"\s{1,3}([A-Za-z]\w*)")
# words that may follow an answer, but cannot follow an article or a pronoun
_AFTER_ANSWER = frozenset(
    "and as because but due for from given is not only or since so that which while with".split()  # noqa: SIM905
)
_IS_RIGHT = re.compile(
    rf"(?<![A-Za-z0-9_\\'’-]){_OPEN}?([A-Z]){_CLOSE}?[.:]?\s(?:is|must\sbe|would\sbe)\s(?:the\s|clearly\s|therefore\s){{0,2}}"
    r"(?:most\s)?(?:correct|right|best|appropriate|true|answer)\b"
)
_ITEM = re.compile(rf"[\W_]{{0,3}}([A-Z])\s?{_CLOSE}?[).:：、]\s")
_BARE = re.compile(r"[\W_]{0,3}[A-Za-z][\W_]{0,3}")
_LETTERS_ONLY = re.compile(r"(?:[\W_]|[A-Z]|\band\b){1,40}")  # as a ground truth: "AC", "A, C", "(A) and (C)"
_SURE = re.compile(rf"{_OPEN}?[A-Z](?:{_CLOSE}(?:\s|\Z)|\.?\Z)")
_LONE = re.compile(rf"(?<![A-Za-z0-9_\\'’-])[A-Z]{_ALONE}")
_SENTENCE = re.compile(r"(?<=[.!?])\s|(?<=[。！？])")
_REFUSED = re.compile(
    r"(?:\bnot|n't|\bthan|\bexcept|\bwithout|\bno)\s{1,3}(?:options?\s{1,3}|choice\s{1,3})?[(\[]?$", re.IGNORECASE
)


def options_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a row, as a map from letter to text.

    The row has the options in `options` or `choices`: a list, a mapping, or `{"label": [...], "text": [...]}`.
    """
    found = row.get("options") or row.get("choices")
    if isinstance(found, Mapping) and isinstance(found.get("text"), Sequence) and not isinstance(found["text"], str):
        labels = found.get("label") or [chr(ord("A") + index) for index in range(len(found["text"]))]
        return {str(label): str(text) for label, text in zip(labels, found["text"], strict=False)}
    if isinstance(found, Mapping):
        return {str(label).strip(): str(text) for label, text in found.items()}
    if isinstance(found, Sequence) and not isinstance(found, str):
        return {chr(ord("A") + index): _without_letter(str(text)) for index, text in enumerate(found[:26])}
    return {}


def _without_letter(option: str) -> str:
    item = _ITEM.match(option)
    return option[item.end() :] if item else option


def right_choices(ground_truth: str, options: Mapping[str, str]) -> frozenset[str] | None:
    """Return the letters of the options that a ground truth names; None if it names no option."""
    named = [_named_by(answer, options) for answer in short_answers.several(ground_truth)]
    return frozenset().union(*named) if all(named) else None


def _named_by(answer: str, options: Mapping[str, str]) -> frozenset[str]:
    boxed = short_answers.last_boxed(answer)
    answer = short_answers.undecorated(answer if boxed is None else boxed)
    letters = None
    if _BARE.fullmatch(answer) or _LETTERS_ONLY.fullmatch(answer) or _ITEM.match(answer):
        letters = letters_at_start(answer.upper() if len(answer) == 1 else answer)
    if letters and (not options or letters <= set(options)):
        return letters
    return _with_text(answer, options) or frozenset()


def is_choice(ground_truth: str, options: Mapping[str, str]) -> bool:
    """Return whether a ground truth names an option.

    Short answers such as "DNA" or "E. coli" name no option.
    """
    if options:
        return right_choices(ground_truth, options) is not None
    boxed = short_answers.last_boxed(ground_truth)
    return _SURE.match(short_answers.undecorated(ground_truth if boxed is None else boxed)) is not None


def chosen(text: str, options: Mapping[str, str]) -> tuple[frozenset[str] | None, bool]:
    """Return (letters, boxed): the letters that a response chooses or None, and whether they are in a box.

    The last box decides if it names an option. Otherwise, the last sentence that announces an answer decides. If there
    is no such sentence, the last line decides.
    """
    text = short_answers.after_thinking(text)
    boxed = short_answers.last_boxed(text)
    letters = None if boxed is None else _read(boxed, options)
    if letters is not None:
        return letters, True
    for tail in short_answers.announced(text):
        letters = _read(tail, options)
        if letters is not None:
            return letters, False
    return _declared_right(text) or _in_last_line(text, options), False


def _read(answer: str, options: Mapping[str, str]) -> frozenset[str] | None:
    """Return the letters that an answer chooses.

    The result is None if the answer chooses nothing, and empty if it gives alternatives such as "A or B".
    """
    letters = letters_at_start(answer)
    if letters and _BARE.fullmatch(short_answers.undecorated(answer)):
        return letters
    return _with_text(answer, options) or letters


def letters_at_start(text: str) -> frozenset[str] | None:
    """Return the option letters with which a text starts, for example {A, C} for "A, C because".

    The result is None if there is no choice, and empty for alternatives such as "A or B".
    """
    text = short_answers.undecorated(text)
    if _SPACED.fullmatch(text):
        return frozenset(text.split())
    position = _match_end(_LEAD, text, 0)
    small = _SMALL.match(text, position)
    if small:
        return frozenset((small[1] or small[2]).upper())
    found: set[str] = set()
    while letters := _LETTERS.match(text, position):
        run = letters["letters"]
        if len(set(run)) < len(run) or (not letters["open"] and _is_a_word(run, text, letters.end())):
            break
        found.update(run)
        if _OR.match(text, letters.end()):
            return frozenset()
        joined = _AND.match(text, letters.end())
        if not joined:
            break
        position = joined.end()
    return frozenset(found) or None


def _match_end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


def _is_a_word(run: str, text: str, end: int) -> bool:
    """Return whether "A" or "I" is an article or a pronoun; the word after it decides."""
    after = _WORD_AFTER.match(text, end)
    return run in ("A", "I") and after is not None and after[1].lower() not in _AFTER_ANSWER


def _with_text(text: str, options: Mapping[str, str]) -> frozenset[str] | None:
    """Return the letter of the option that has this text.

    The result is None if no option or several options have this text.
    """
    same = [letter for letter, option in options.items() if short_answers.same_text(text, option)]
    return frozenset(same) if len(same) == 1 else None


def _declared_right(text: str) -> frozenset[str] | None:
    """Return the last letter that the text declares correct, for example in "B is correct"; None if there is none."""
    letters = [right[1] for right in _IS_RIGHT.finditer(short_answers.undecorated(text))]
    return frozenset(letters[-1]) if letters else None


def _in_last_line(text: str, options: Mapping[str, str]) -> frozenset[str] | None:
    line = short_answers.undecorated(short_answers.last_line(text))
    if _BARE.fullmatch(line) or _ITEM.match(line):
        return letters_at_start(line)
    if same := _with_text(line, options):
        return same
    for sentence in reversed(_SENTENCE.split(line)):
        letters = frozenset(
            lone[0]
            for lone in _LONE.finditer(sentence)
            if not _is_a_word(lone[0], sentence, lone.end()) and not _REFUSED.search(sentence[: lone.start()][-20:])
        )
        if letters:
            return letters
    return None
