r"""The reward of an exactly right mathematical answer: 1.0, else 0.0.

The final answer of a text is its last `\boxed{...}`; without one, what follows its last `####`; without that,
its last number. Numbers are compared exactly as fractions; anything else (LaTeX, sets, symbols) goes to
math-verify in a process of its own, because what a model writes can keep a computer algebra system busy
for ever.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from roll_opd.rewards.interface import RewardSample
from roll_opd.rewards.registry import register
from roll_opd.rewards.symbolic import same_expression

MAX_TEXT = 20_000  # characters looked at, from the end: the answer is there
MAX_EXPRESSION = 500  # characters of an answer that is handed to math-verify
MAX_DIGITS = 100  # digits on one side of a number's point; longer ones are compared as text

# A number as people write it: 72  -3  1,234.50  3/4  .5
_NUMBER = re.compile(
    r"""
    (?:(?<![\w)\]}])[-+])?                                # after a digit or bracket it subtracts
    (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)  # with thousands commas or without; decimals
    (?:/\d+)?                                            # a quotient
    """,
    re.ASCII | re.VERBOSE,
)
_PLAIN = re.compile(
    rf"([-+]?)(\d{{0,{MAX_DIGITS}}})(?:\.(\d{{1,{MAX_DIGITS}}}))?(?:/(\d{{1,{MAX_DIGITS}}}))?", re.ASCII
)
_FORMULA = re.compile(r"\$([^$]+)\$")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|\\!,|,\\!)(?=\d{3}(?!\d))", re.ASCII)


@register("math_rule")
def math_rule(samples: Sequence[RewardSample]) -> list[float | None]:
    """1.0 for each sample whose final answer equals its ground truth, else 0.0; any text at all is taken.

    None for a sample without a ground truth: a reward of 0 for it would be an invention.
    """
    return [
        None if sample.ground_truth is None else float(is_right(sample.response, sample.ground_truth))
        for sample in samples
    ]


def is_right(response: str, ground_truth: str) -> bool:
    """Whether the final answer of `response` equals `ground_truth`."""
    gold = _last_boxed(ground_truth)
    gold = clean(ground_truth if gold is None else gold)
    answer = final_answer(response[-MAX_TEXT:], numeric=as_number(gold) is not None)
    if answer is None or not gold:
        return False
    answer = clean(answer)
    if answer == gold:
        return True
    numbers = as_number(gold), as_number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    if max(len(gold), len(answer)) > MAX_EXPRESSION:
        return False
    return same_expression(gold, answer)


def final_answer(text: str, numeric: bool = True) -> str | None:
    """The final answer of `text`, None where it has none.

    Where the answer sought is a number (`numeric`), a text without box and mark gives its last number; else
    its last `$formula$`, or its last line.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, tail = text.rpartition("####")
    if mark:
        lines = tail.strip().splitlines()
        first_line = lines[0] if lines else ""
        return _pick(first_line, 0) or first_line if numeric else first_line
    if numeric:
        return _pick(text, -1)
    formulas = _FORMULA.findall(text)
    lines = formulas or text.strip().splitlines()
    return lines[-1] if lines else None


def _pick(text: str, which: int) -> str | None:
    numbers = _NUMBER.findall(text)
    return numbers[which] if numbers else None


def _last_boxed(text: str) -> str | None:
    r"""The inside of the last `\boxed{...}` whose braces balance; None where there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def clean(answer: str) -> str:
    """An answer without spaces around it, dollar and percent signs, thousands commas, a final full stop."""
    answer = answer.strip().replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    return _THOUSANDS.sub("", answer.strip().removesuffix(".").strip())


def as_number(answer: str) -> Fraction | None:
    """The exact value of a cleaned answer that is a plain number or a quotient of two; None for anything
    else.
    """
    match = _PLAIN.fullmatch(answer)
    if match is None:
        return None
    sign, whole, decimals, divisor = match.groups()
    if (not whole and not decimals) or (divisor and int(divisor) == 0):
        return None
    value = Fraction(f"{whole or '0'}.{decimals or '0'}") / int(divisor or 1)
    return -value if sign == "-" else value
