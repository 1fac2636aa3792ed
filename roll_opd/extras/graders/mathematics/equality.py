r"""Equality of two answers by their form: words, choices, times, ratios, lists, sets, points and intervals.

Single expressions and sets of numbers are compared by an `Algebra`. docs/rewards/math_rule.md has the rules.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Literal

from roll_opd.extras.graders.mathematics.notation import (
    MAX_EXPRESSION,
    NAME,
    as_number,
    assigned,
    exact,
    is_no_rounding,
    members_of,
    plain,
    point_of,
    split_outside,
)
from roll_opd.extras.graders.mathematics.units import conversion, split_unit

MAX_MEMBERS = 30  # longer lists are compared as text

_OF_SETS = re.compile(r"\\(?:cup|cap|setminus|backslash)(?![A-Za-z])")
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]")
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
_EQUALS = re.compile(r"(?:=|\\approx(?![A-Za-z]))")
# 0.42, 42%, 4.2 \\cdot 10^{-1}
_DECIMAL = re.compile(
    r"(?P<digits>[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40}))"
    r"(?:[eE](?P<e>[-+]?\d{1,3})|\s*\\(?:cdot|times)\s*10\s*\^\s*\{?\s*(?P<power>[-+]?\d{1,3})\s*\}?)?\s*(?P<percent>%?)",
    re.ASCII,
)
_LETTER = re.compile(r"(?<![\\A-Za-z])(?![ei](?![A-Za-z]))[A-Za-z](?![A-Za-z])")  # a variable or a function
_FUNCTION = re.compile(r"[A-Za-z]'?\([a-z]\)|y")
_MEMBER = re.compile(r"^\s*[A-Za-z](?:_\{?\w\}?)?\s*\\in(?![A-Za-z])\s*|^[A-Z](?=\([^()]*,)")  # x in [0,1), P(2,3)
_CHOICE = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\(\s*([A-J])\s*\)\s*|([A-J])(?:[.):]\s*|$))([\w\\$].*)?", re.IGNORECASE
)
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_BASE = re.compile(r"\(?\s*(?=[\dA-F]*\d)([\dA-F]+)\s*\)?_\{?\s*(\d+)\s*\}?", re.ASCII)
_WORDS = re.compile(r"(?=.*[A-Za-z]{3}|no$)[A-Za-z][A-Za-z0-9 ,.'?-]*", re.IGNORECASE)
_NOT_WORDS = re.compile(r"[^A-Za-z0-9 ,.'?-]|^\d|(?<![A-Za-z])(?:sin|cos|tan|log|exp|sqrt)(?![A-Za-z])")


Question = Literal["same_expression", "same_set", "contradict"]  # the functions of module `algebra`
Algebra = Callable[[Question, str, str], bool]  # (question, gold, answer) -> the answer of a computer algebra system


def number_in(text: str) -> Fraction | None:
    """Return the number in an answer; None if the answer is not a number.

    The answer may have a unit, thousands separators or a percent sign.
    """
    if len(text) > MAX_EXPRESSION:
        return None
    return as_number(split_unit(plain(text))[0].rstrip("%"))


def same_answer(gold: str, answer: str, algebra: Algebra) -> bool:
    """Return whether two answers are equal.

    Both answers may use any notation.
    """
    gold, answer = plain(gold), plain(answer)
    if not gold or not answer:
        return False
    if _squeezed(gold) == _squeezed(answer):
        return True
    for same in (_same_choice, _same_time, _same_in_base):
        verdict = same(gold, answer)
        if verdict is not None:
            return verdict
    return _same(gold, answer, algebra)


def _same(gold: str, answer: str, algebra: Algebra) -> bool:
    gold, answer = _MEMBER.sub("", gold), _MEMBER.sub("", answer)
    if any(map(_is_of_sets, (gold, answer))) and all(_is_of_sets(text) or _in_braces(text) for text in (gold, answer)):
        return algebra("same_set", exact(gold), exact(answer))
    golds, answers = members_of(gold), members_of(answer)
    gold_names, answer_names = assigned(golds), assigned(answers)
    if gold_names and answer_names:
        return gold_names.keys() == answer_names.keys() and all(
            _same(gold_names[name], answer_names[name], algebra) for name in gold_names
        )
    if gold_names or answer_names:  # x=1, y=2 against (1,2)
        golds = list(gold_names.values()) if gold_names else golds
        answers = list(answer_names.values()) if answer_names else answers
        gold_point, answer_point = point_of(golds), point_of(answers)
        golds, answers = (gold_point or golds), (answer_point or answers)
        return len(golds) == len(answers) <= MAX_MEMBERS and all(
            _same(one, other, algebra) for one, other in zip(golds, answers, strict=True)
        )
    if len(golds) == len(answers) == 1:
        return _same_single(golds[0], answers[0], algebra)
    if max(len(golds), len(answers)) > MAX_MEMBERS:
        return False
    for few, many, text in ((golds, answers, answer), (answers, golds, gold)):  # "1, 2" against (1, 2)
        point = point_of(few)
        if (
            point
            and len(point) == len(many)
            and few[0].startswith("(")
            and not _RELATION.search(text)
            and not _in_braces(text)
        ):
            return all(_same(one, other, algebra) for one, other in zip(point, many, strict=True))
    if _is_set(golds) and _is_set(answers):
        return algebra("same_set", _as_one_set(golds, gold), _as_one_set(answers, answer))
    return _same_members(golds, answers, algebra)


def _same_members(golds: Sequence[str], answers: Sequence[str], algebra: Algebra) -> bool:
    """Return whether two lists have the same members; order and repetition are ignored."""
    same = [[_same_single(gold, answer, algebra) for answer in answers] for gold in golds]
    return all(map(any, same)) and all(map(any, zip(*same, strict=True)))


def _same_single(gold: str, answer: str, algebra: Algebra) -> bool:
    golds, answers = split_outside(gold, _APPROXIMATELY), split_outside(answer, _APPROXIMATELY)
    if len(golds) > 1 or len(answers) > 1:  # an exact value and its rounding
        return (
            _agree(golds, algebra)
            and _agree(answers, algebra)
            and any(_same_single(one, other, algebra) for one in _values(golds) for other in _values(answers))
        )
    gold, answer = _sides(gold, answer)
    words = _same_words(gold, answer)
    if words is not None:
        return words
    if _squeezed(gold) == _squeezed(answer):
        return True
    if len(members_of(gold)) > 1 or len(members_of(answer)) > 1:
        return _same(gold, answer, algebra)
    gold_point, answer_point = point_of([gold]), point_of([answer])
    if gold_point and answer_point and _squeezed(gold)[0] == _squeezed(answer)[0] and gold[-1] == answer[-1]:
        return len(gold_point) == len(answer_point) and all(
            _same(one, other, algebra) for one, other in zip(gold_point, answer_point, strict=True)
        )
    if _is_set([gold]) and _is_set([answer]):
        return algebra("same_set", exact(gold), exact(answer))
    if gold_point or answer_point:
        return False
    if ":" in gold or ":" in answer:
        return _same_ratio(gold.split(":"), answer.split(":"), algebra)
    return _same_quantity(gold, answer, algebra)


def _same_quantity(gold: str, answer: str, algebra: Algebra) -> bool:
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    factor = conversion(answer_unit, gold_unit)
    if factor is None:
        return False
    gold_percent, answer_percent = gold.endswith("%"), answer.endswith("%")
    gold, answer = exact(gold.rstrip("% ")), exact(answer.rstrip("% "))
    if factor != 1:
        answer = f"\\frac{{{factor.numerator}}}{{{factor.denominator}}}\\cdot ({answer})"
    if gold_percent == answer_percent:
        return _same_value(gold, answer, algebra)
    ratio, percent = (answer, gold) if gold_percent else (gold, answer)
    whole = as_number(percent)
    if whole is not None and abs(whole) >= 1 and _same_value(ratio, percent, algebra):  # 50 for 50 %; not 0.5 for 0.5 %
        return True
    return _same_value(ratio, f"\\frac{{1}}{{100}}\\cdot ({percent})", algebra)


def _same_value(gold: str, answer: str, algebra: Algebra) -> bool:
    numbers = as_number(gold), as_number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    if not gold or not answer:
        return False
    return algebra("same_expression", gold, answer)


def _same_ratio(golds: Sequence[str], answers: Sequence[str], algebra: Algebra) -> bool:
    """Return whether two ratios are equal; for example, 3:4 equals 6:8.

    If only one of the two answers is written as a ratio, it is compared as a quotient: 3:4 equals 3/4.
    """
    if len(golds) != len(answers):
        quotients = [f"\\frac{{{side[0]}}}{{{side[1]}}}" if len(side) == 2 else side[0] for side in (golds, answers)]
        return max(len(golds), len(answers)) == 2 and _same_value(exact(quotients[0]), exact(quotients[1]), algebra)
    first_gold, first_answer = golds[0], answers[0]
    return all(
        _same_value(exact(f"({gold})\\cdot ({first_answer})"), exact(f"({answer})\\cdot ({first_gold})"), algebra)
        for gold, answer in zip(golds[1:], answers[1:], strict=True)
    )


def _sides(gold: str, answer: str) -> tuple[str, str]:
    """Return both answers without a prefix such as "x =" or "x in".

    A prefix is removed in three cases: only one answer has a prefix, both answers have the same prefix, or both answers
    define a function.
    """
    golds, answers = split_outside(gold, _EQUALS), split_outside(answer, _EQUALS)
    if len(golds) > 1 and len(answers) > 1:
        if _squeezed(golds[0]) == _squeezed(answers[0]) and NAME.fullmatch(golds[0].strip()):
            return golds[-1].strip(), answers[-1].strip()
        functions = [_FUNCTION.fullmatch(sides[0].strip()) for sides in (golds, answers)]
        if all(functions) and golds[0].strip() != answers[0].strip():
            return golds[-1].strip(), answers[-1].strip()
        return gold, answer
    if len(answers) > 1:
        return gold, _value(answers)
    if len(golds) > 1 and (NAME.fullmatch(golds[0].strip()) or NAME.fullmatch(golds[-1].strip())):
        return _value(golds), answer
    return gold, answer


def _agree(sides: Sequence[str], algebra: Algebra) -> bool:
    """Return whether the sides of "a ≈ b ≈ c" agree: no two of them contradict each other.

    A list of guesses is therefore rejected. For each pair of sides:

    - If one of the two is a decimal, it must be a rounding or a truncation of the other one.
    - If neither is a decimal, they must be equal. This is not checked if the text has only these two sides and one of
      them contains a letter.

    A side that is only a name, such as x, agrees with every value.
    """
    texts = [split_unit(_value(split_outside(side, _EQUALS)))[0].strip() for side in sides]
    texts = [text for text in texts if text and not (NAME.fullmatch(text) and text != "\\pi")]
    for one, other in combinations(texts, 2):
        rounded = [text for text in (other, one) if _DECIMAL.fullmatch(text)]
        if rounded:
            rounding = max(rounded, key=_last_place)
            contradicts = _contradict(one if rounding == other else other, rounding, algebra)
        else:
            of_names = len(texts) == 2 and any(map(_LETTER.search, texts))
            contradicts = not of_names and not _same_value(_without_percent(one), _without_percent(other), algebra)
        if contradicts:
            return False
    return True


def _last_place(decimal: str) -> Fraction:
    found = _DECIMAL.fullmatch(decimal)
    assert found
    return _scale(found) / 10 ** len(found["digits"].partition(".")[2])


def _scale(decimal: re.Match[str]) -> Fraction:
    power = int(decimal["power"] or decimal["e"] or 0)
    return Fraction(10) ** power / (100 if decimal["percent"] else 1)


def _contradict(text: str, rounding: str, algebra: Algebra) -> bool:
    """Return whether a decimal contradicts a value.

    `rounding` contradicts the value in `text` if it is neither a rounding nor a truncation of it.

    Args:
        rounding: a decimal, which may have a power of ten or a percent sign.
    """
    decimal = _DECIMAL.fullmatch(rounding)
    assert decimal
    scale = _scale(decimal)
    value = f"\\frac{{{scale.denominator}}}{{{scale.numerator}}}\\cdot ({_without_percent(text)})"
    number = as_number(text.rstrip("% "))
    if number is None:
        return algebra("contradict", value, decimal["digits"])
    number /= scale * (100 if text.endswith("%") else 1)
    return is_no_rounding(number, Fraction(decimal["digits"]), decimal["digits"])


def _without_percent(text: str) -> str:
    return f"\\frac{{1}}{{100}}\\cdot ({exact(text.rstrip('% '))})" if text.endswith("%") else exact(text)


def _values(sides: Sequence[str]) -> list[str]:
    """Return the numeric sides of "a ≈ b"; if no side is numeric, return all sides."""
    texts = {side.strip(): split_unit(_value(split_outside(side, _EQUALS)))[0].strip() for side in sides}
    found = [
        side
        for side, text in texts.items()
        if re.search(r"\d|\\pi(?![A-Za-z])", text)
        and (text == "\\pi" or not NAME.fullmatch(text))
        and not _LETTER.search(text)
    ]
    return found or list(texts)


def _value(sides: Sequence[str]) -> str:
    first, last = sides[0].strip(), sides[-1].strip()
    return first if NAME.fullmatch(last) and not NAME.fullmatch(first) else last


def _is_of_sets(text: str) -> bool:
    """Return whether a text is a union, an intersection or a difference of sets."""
    return len(split_outside(text, _OF_SETS)) > 1


def _in_braces(text: str) -> bool:
    return text.startswith(("\\{", "{"))


def _is_set(members: Sequence[str]) -> bool:
    """Return whether all members are sets of numbers, such as intervals, inequalities or unions of these."""
    return all(
        _is_of_sets(part)
        or _RELATION.search(part)
        or "\\mathbb" in part
        or "\\emptyset" in part
        or (point_of([part]) is not None and len(point_of([part]) or ()) == 2)
        for part in members
    )


def _as_one_set(members: Sequence[str], text: str) -> str:
    """Join members into one set.

    If all members are inequalities, the set is their intersection, unless the text has the word "or". In all other
    cases, the set is the union of the members.
    """
    together = all(map(_RELATION.search, members)) and not re.search(r"(?<![A-Za-z])or(?![A-Za-z])", text)
    return ("\\cap " if together else "\\cup ").join(exact(member) for member in members)


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\d)\s|\s(?!\d)", "", text)


def _same_choice(gold: str, answer: str) -> bool | None:
    golds, answers = _CHOICE.fullmatch(gold), _CHOICE.fullmatch(answer)
    if golds is None or answers is None:
        return None
    if (golds[1] or golds[2]).upper() != (answers[1] or answers[2]).upper():
        return False
    return not golds[3] or not answers[3] or golds[3].casefold() == answers[3].casefold()


def _same_time(gold: str, answer: str) -> bool | None:
    golds, answers = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(answer)
    if golds is None or answers is None:
        return None
    halves = {half.lower() for half in (golds[3], answers[3]) if half}
    return [int(golds[1]), golds[2]] == [int(answers[1]), answers[2]] and len(halves) < 2


def _same_in_base(gold: str, answer: str) -> bool | None:
    golds, answers = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if golds is None and answers is None:
        return None
    return golds is not None and answers is not None and golds.groups() == answers.groups()


def _same_words(gold: str, answer: str) -> bool | None:
    texts = [re.sub(r"\s+", " ", text.strip(" .?")) for text in (gold, answer)]
    if not any(map(_WORDS.fullmatch, texts)) or any(map(_NOT_WORDS.search, texts)):
        return None
    words = [
        [word for word in re.split(r"[ ,.-]+", text.casefold()) if word not in ("a", "an", "the")] for text in texts
    ]
    return words[0] == words[1]
