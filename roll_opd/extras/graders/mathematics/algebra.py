r"""Comparison of LaTeX expressions and sets with math-verify and SymPy, for module `equality`.

This module does not limit the run time. Module `processes` runs it with a time limit.
"""

import re
from typing import cast

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from sympy import (
    Basic,
    Derivative,
    EmptySet,
    Expr,
    FiniteSet,
    I,
    Intersection,
    Interval,
    N,
    Reals,
    Set,
    Union,
)
from sympy.logic.boolalg import Boolean
from sympy.matrices import MatrixBase
from sympy.simplify.simplify import simplify

from roll_opd.extras.graders.mathematics.notation import brackets_inside, is_no_rounding, split_outside

_READ = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
_PLAIN_PRODUCTS = ConversionConfig(interpret_as_mixed_fractions=False)  # mixed numbers are already fractions
_DIGITS = 30  # digits of a numeric comparison
_APART = 10.0**-20  # relative difference above which two numbers differ
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\})\s*\^\\circ")
_UNREADABLE = re.compile(r"\d\s+\d")  # 5 5 is neither 25 nor 10
_SETMINUS = re.compile(r"\\(?:setminus|backslash)(?![A-Za-z])")
_CUP, _CAP = re.compile(r"\\cup(?![A-Za-z])"), re.compile(r"\\cap(?![A-Za-z])")


def same_expression(gold: str, answer: str) -> bool:
    """Return whether two expressions, equations or matrices are equal."""
    golds, answers = _read(gold), _read(answer)
    if isinstance(golds, Set) != isinstance(answers, Set):
        return False
    if golds.has(Derivative) or answers.has(Derivative):  # the derivatives of all symbols would be 0
        return bool(golds == answers)
    if not isinstance(golds, MatrixBase) and not isinstance(answers, MatrixBase):
        apart = _apart(golds, answers)
        if apart is not None:
            return not apart
    return bool(verify(golds, answers, float_rounding=15, timeout_seconds=None))


def same_set(gold: str, answer: str) -> bool:
    """Return whether two sets of numbers are equal.

    A set is an interval, an inequality or a union of these.
    """
    golds, answers = _set(gold), _set(answer)
    if golds is None or answers is None:
        return same_expression(gold, answer)
    variables = [_variables(text) for text in (gold, answer)]
    if all(variables) and variables[0] != variables[1]:
        return False
    return bool(
        golds == answers or simplify(golds) == simplify(answers) or golds.symmetric_difference(answers).is_empty
    )


def contradict(value: str, rounding: str) -> bool:
    """Return whether a decimal contradicts a value.

    `rounding` contradicts `value` if it is neither a rounding nor a truncation of it. The result is False if `value` is
    not a finite real number.

    Args:
        rounding: a decimal.
    """
    number = _read(value)
    if number.free_symbols or not _is_expression(number):
        return False
    measured = N(number, _DIGITS)
    if not (measured.is_real and measured.is_finite):
        return False
    return bool(is_no_rounding(measured, N(rounding, _DIGITS), rounding))


def _read(text: str) -> Basic | MatrixBase:
    if _UNREADABLE.search(text):
        raise ValueError(f"two numbers side by side: {text}")
    text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    parsed = latex2sympy(
        normalize_latex(text, _READ),
        is_real=True,
        convert_degrees=False,
        normalization_config=None,
        conversion_config=_PLAIN_PRODUCTS,
    )
    if isinstance(parsed, FiniteSet) and len(parsed.args) == 1:
        parsed = parsed.args[0]
    imaginary = [symbol for symbol in parsed.free_symbols if symbol.name == "i"]
    return parsed.subs(imaginary[0], I) if imaginary else parsed


def _apart(gold: Basic, answer: Basic) -> bool | None:
    """Return whether two numbers differ.

    The result is None if one of them is not a number, or if they are too close to decide.
    """
    if gold.free_symbols or answer.free_symbols:
        return None
    exact = gold.doit(), answer.doit()
    if not all(_is_expression(value) for value in exact):
        return None
    if all(value.is_Rational for value in exact):
        return exact[0] != exact[1]
    values = [N(value, _DIGITS) for value in exact]
    if not all(value.is_number and value.is_finite for value in values):
        return None
    size = max(abs(values[0]), abs(values[1]))
    return True if size and abs(values[0] - values[1]) > _APART * size else None


def _is_expression(value: Basic | MatrixBase) -> bool:
    return bool(getattr(value, "is_number", False))


def _set(text: str) -> Set | None:
    """Parse a set of real numbers; return None for other text."""
    text = text.strip()
    for separator, combine in (
        (_CUP, Union),
        (_CAP, Intersection),
        (_SETMINUS, lambda one, *others: one - Union(*others)),
    ):
        parts = split_outside(text, separator)
        if len(parts) > 1:
            sets = [_set(part) for part in parts]
            return None if any(part is None for part in sets) else combine(*sets)
    if re.fullmatch(r"\\mathbb\{R\}", text):
        return Reals
    if text == "\\emptyset":
        return EmptySet
    inside = brackets_inside(text)
    ends = split_outside(inside, re.compile("[,;]")) if inside is not None else []
    if inside is not None and text.startswith(("\\{", "{")):
        return FiniteSet(*map(_read, ends))
    if len(ends) == 2:
        low, high = (cast(Expr, _read(end)) for end in ends)  # Interval requires expressions
        left_open, right_open = text[0] == "(", text[-1] == ")"
        if bool(low > high) or (low.is_infinite and not left_open) or (high.is_infinite and not right_open):
            raise ValueError(f"{text} is not an interval")
        return Interval(low, high, left_open, right_open)
    relation = _read(text)
    if not isinstance(relation, Boolean) or relation.is_Symbol or len(relation.free_symbols) != 1:
        return None
    return relation.as_set()


def _variables(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"(?<![A-Za-z\\])[a-z](?![A-Za-z])", text)) - {"e", "i"}
