"""Normalisation of mathematical notation, and parsers of answers with several values.

LaTeX synonyms, Unicode symbols and numbers are normalised. Decimals become exact fractions, so no floats are compared:
0.333 is not 1/3. The parsers return the members of a list, the coordinates of a point, or the values of named
variables.

Matching a pattern takes time linear in the text. The text has at most `MAX_EXPRESSION` characters.
"""

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

MAX_EXPRESSION = 500  # characters; longer answers are compared as text
MAX_DIGITS = 100  # digits on each side of the decimal point; longer numbers are compared as text

_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑﹣", "-"),
        **dict.fromkeys("×✕", "\\times "),
        **dict.fromkeys("⋅·∙•", "\\cdot "),
        **dict.fromkeys("“”‘’", ""),
        "÷": "/", "∕": "/", "⁄": "/", "∶": ":", "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ ", "º": "^\\circ ",
        "≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ",
        **dict.fromkeys("≈≃≅≐≒", "\\approx "), "…": "\\ldots ", "⋯": "\\ldots ", "±": "\\pm ",
        "∓": "\\mp ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ", "∈": "\\in ", "ℝ": "\\mathbb{R}",
        "ℤ": "\\mathbb{Z}", "ℚ": "\\mathbb{Q}", "ℕ": "\\mathbb{N}", "ℂ": "\\mathbb{C}", "∠": "\\angle ",
        "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "δ": "\\delta ", "θ": "\\theta ", "λ": "\\lambda ",
        "μ": "\\mu ", "φ": "\\phi ", "ω": "\\omega ", "σ": "\\sigma ", "ρ": "\\rho ", "τ": "\\tau ",
    }
)  # fmt: skip
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_ROOT = re.compile(r"√\s*(\d+|\w|\([^()]*\)|\{[^{}]*\})")

_ARGUMENT = r"(\\[A-Za-z]+|[0-9A-Za-z]|\{[^{}]*\})"
# (pattern, replacement), applied in order
_RULES = [
    (re.compile(pattern), meaning)
    for pattern, meaning in (
        (r"\\(?:left|right|middle)\s?\.", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|rm|bf|it)(?![A-Za-z])", ""),
        (r"(?<!\\)\\!|(?<!\\)\\\)$|^\\\(|(?<!\\)\\\]$|^\\\[|\{\}", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\s+|&nbsp;", " "),
        (r"\\(?:text|math|mbox|hbox|operatorname|emph|underline|boldsymbol|bm|f?box|boxed)(?:rm|bf|it|sf|tt|normal)?\s*"
         r"\{([^{}]*)\}", r" \1 "),
        (r"\\(?:text|math)(?:rm|bf|it|sf|tt|normal)?\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:text)?color\s*\{\w+\}", ""),
        (r"\s*([_^])\s*", r"\1"),
        (r"(?<=\d)\^\{?o\}?(?![A-Za-z])", r"^\\circ "),
        (r"_([0-9A-Za-z])", r"_{\1}"),
        (r"\\over(?:line|rightarrow)\s*\{\s*([A-Z]{1,3})\s*\}", r"\1"),
        (r"\\(?:dfrac|tfrac|cfrac)", r"\\frac"),
        (r"\\[dt]binom", r"\\binom"),
        (r"\\varnothing|\\\{\s*\\\}|\\lbrace\s*\\rbrace", r"\\emptyset"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\langle(?![A-Za-z])|\\lparen(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])|\\rparen(?![A-Za-z])", ")"),
        (r"\\[lr]?vert(?![A-Za-z])|\\mid(?![A-Za-z])", "|"),
        (r"\\(?:leq|leqslant|le)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant|ge)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\(?:simeq|cong|thickapprox|approxeq|doteq|fallingdotseq)(?![A-Za-z])", r"\\approx "),
        (r"^\s*\\approx", ""),
        (r"\\(?:c|d)?dots[cbmio]?(?![A-Za-z])|\\hdots(?![A-Za-z])|(?<![.\d])\.{3}(?![.\d])", r"\\ldots "),
        (r"\\lt(?![A-Za-z])|&lt;", "<"),
        (r"\\gt(?![A-Za-z])|&gt;", ">"),
        (r"\\neq?(?![A-Za-z])|!=", r"\\ne "),
        (r"\\(?:colon|ratio)(?![A-Za-z])", ":"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\*\*(?=\S)", "^"),
        (r"\*|\\ast(?![A-Za-z])", r"\\cdot "),
        (r"\^?\{?\\(?:circ|degree|textdegree)(?![A-Za-z])\s*\}?", r"^\\circ "),
        (r"\\mathbb\s*\{?\s*R\s*\}?|\\R(?![A-Za-z])|\\Reals|(?i:all real numbers|all reals)", r"\\mathbb{R}"),
        (r"^\s*\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\})?\s*[|:]\s*(.*)\\\}\s*$", r"\1"),
        (r"(?i:\bno (?:real )?solutions?\b|\bempty set\b|^\s*none\s*$)", r"\\emptyset"),
        (r"(?i:\bdoes not exist\b)", "DNE"),
        (r"\\?(?<![A-Za-z])(?:\\?infty|infinity|inf)(?![A-Za-z])", r"\\infty "),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"\+\s*\\infty", r"\\infty"),
        (r"(?<=[)\]}])\s*U\s*(?=\\?[(\[{])", r"\\cup "),
        (r"\\log_\{?e\}?(?![A-Za-z])", r"\\ln "),
        (r"(?<![A-Za-z\\])(sqrt|ln|log|sin|cos|tan|exp)(?=\s*[\d(])", r"\\\1"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\[[^\[\]]*\])?\s*([0-9A-Za-z])", r"\\sqrt\1{\2}"),
        (r"\\frac\s*" + _ARGUMENT + r"\s*" + _ARGUMENT, lambda found: _braced("frac", found)),
        (r"\\binom\s*" + _ARGUMENT + r"\s*" + _ARGUMENT, lambda found: _braced("binom", found)),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\{?([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}?", r"\\binom{\1}{\2}"),
        (r"[(\[]?\s*\\begin\{(?:array\}\s*\{[^{}]*|matrix|smallmatrix)\}", r"\\begin{pmatrix}"),
        (r"\\end\{(?:array|matrix|smallmatrix)\}\s*[)\]]?", r"\\end{pmatrix}"),
        (r"(begin|end)\{bmatrix\}", r"\1{pmatrix}"),
        (r"(?i:(?<=\d)\s*per ?cent\b|(?<=\d)\s*pct\b)|\\%", "%"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s?\^)", r"\\cdot "),
        (r"(?<=\d)\s+to\s+(?=\d)", ":"),
        (r"(?i)^\s*(?:the )?(?:final )?answer(?: is|:|=)", ""),
        (r"\((?:mod|\\b?mod|\\text\{\s*mod\s*\})\s*\{?\d+\}?\s*\)|\\p(?:mod|od)\s*(?:\{\s*\d+\s*\}|\d+)", ""),
    )
]  # fmt: skip

_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?![\d,]|\.\d*,)", re.ASCII)
_THOUSANDS_BRACED = re.compile(r"(?<=\d)(?:\{,\}|\\,|,\\!\s*)(?=\d{3}(?!\d))", re.ASCII)
_SPACED = re.compile(r"([-+$\\]*)(\d{1,3})((?: \d{3})+)(?![\d/])", re.ASCII)
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\(?:overline|bar|dot)\s*\{?(\d{1,20})\}?", re.ASCII)
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,4})(?![\d.A-Za-z])", re.ASCII)
_DECIMAL = re.compile(rf"(?<![\d.])(\d{{0,{MAX_DIGITS}}})\.(\d{{1,{MAX_DIGITS}}})(?![\d.])", re.ASCII)
_MIXED = re.compile(
    r"(?<![\w.^_}\\/])(\d{1,20})\s*(?:\s(?:and )?(\d{1,20})/(\d{1,20})|\\frac\{(\d{1,20})\}\{(\d{1,20})\})", re.ASCII
)
_BARE = re.compile(r"-?\d{1,20}(?:\.\d{1,20})?", re.ASCII)
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MILLIONS = re.compile(rf"(?<=[\d}}])\s*({'|'.join(_POWERS_OF_TEN)})(?![A-Za-z])", re.ASCII | re.IGNORECASE)


def plain(text: str) -> str:
    """Return a text with normalised spaces, symbols and numbers.

    Synonyms are replaced. Thousands separators, and signs that enclose the text, are removed.
    """
    if _BARE.fullmatch(text):  # fast path for most answers
        return text
    text = _VULGAR.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = _SUBSCRIPT.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(_SYMBOLS)).translate(_SYMBOLS)
    text = "".join(" " if char in "\t\n\r" else char for char in text if char in "\t\n\r" or char.isprintable())
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1].strip('(){}')}}}", text)
    text = unwrapped(text)
    text = _THOUSANDS_BRACED.sub("", text)
    for pattern, meaning in _RULES:
        text = pattern.sub(meaning, text)
    text = unwrapped(text)
    if not re.search(r"[(\[]|\\\{|^\{", text):  # (1,234) is a pair
        text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    text = _SPACED.sub(lambda found: found[0].replace(" ", ""), text, count=1) if _SPACED.match(text) else text
    text = _MILLIONS.sub(lambda found: f"\\cdot 10^{{{_POWERS_OF_TEN[found[1].lower()]}}}", text)
    return re.sub(r"\s+", " ", text).strip()


def exact(text: str) -> str:
    """Replace decimals, mixed numbers and repeating decimals of a normalised text by LaTeX fractions."""
    text = _REPEATING.sub(lambda found: _latex(_repeating(*found.groups())), text)
    text = _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", text)
    text = _MIXED.sub(_mixed, text)
    return _DECIMAL.sub(lambda found: _latex(Fraction(found[0])), text)


def unwrapped(text: str) -> str:
    """Return a text without enclosing dollar signs, asterisks and braces, and without punctuation at its end."""
    for _ in range(4):
        text = text.strip().strip("*").rstrip(".;:,").lstrip(":=").strip()
        if text.endswith("\\"):
            text = text[:-1]
        for left, right in (("$$", "$$"), ("$", "$"), ("{", "}")):
            inside = text[len(left) : -len(right)]
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                if left == "$" and (inside.endswith("\\") or "$" in inside):
                    continue
                if left == "{" and (inside.endswith("\\") or "," in inside or not _closes_last(text)):
                    continue
                text = inside
    return text


def _closes_last(text: str) -> bool:
    depth = 0
    for position, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return position == len(text) - 1
    return False


def _braced(command: str, found: "re.Match[str]") -> str:
    return f"\\{command}" + "".join(part if part.startswith("{") else f"{{{part}}}" for part in found.groups())


def _repeating(whole: str, once: str, again: str) -> Fraction:
    head = Fraction(f"{whole or '0'}.{once or '0'}")
    return head + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))


def _mixed(found: "re.Match[str]") -> str:
    whole, above, below = (int(part) for part in found.groups() if part)
    if above >= below:
        return found[0]
    return _latex(whole + Fraction(above, below))


def _latex(value: Fraction) -> str:
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value.numerator)


_OPEN = ("(", "[", "{", "\\{")
_BRACKET = re.compile(r"\\[{}]|[()\[\]{}]")
_COMMA = re.compile(r",?\s*(?<![A-Za-z])(?:and|or)(?![A-Za-z])|[,;]")
NAME = re.compile(
    r"\(?\s*\\?[A-Za-z]{1,12}(?:_\{?\w{1,3}\}?)?'?(?:\s*,\s*[A-Za-z](?:_\{?\w\}?)?)*\s*\)?(?:\([a-z, ]{1,9}\))?"
)


def assigned(members: Sequence[str]) -> dict[str, str] | None:
    """Parse "x=1, y=2" to a map from name to value, sorted by name.

    The result is None for other texts. It is also None for several values of one variable, such as x_1=1, x_2=2.
    """
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
    r"""Return the members of a list, of a set in braces, or of "a +- b".

    For other texts, the only member is the text itself.
    """
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
    """Return the coordinates of a point such as (1, 2) or [0, 1).

    The result is None if there is more than one member, or if the only member is not a point.
    """
    if len(members) != 1:
        return None
    inside = brackets_inside(members[0].strip())
    if inside is None or not members[0].strip().startswith(("(", "[")):
        return None
    coordinates = split_outside(inside, re.compile(r"[,;]"))
    return [part.strip() for part in coordinates] if len(coordinates) > 1 else None


def brackets_inside(text: str) -> str | None:
    """Return the content of the brackets that enclose the whole text; None if there are no such brackets.

    Brackets of any kind count.
    """
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
    """Split a text at the separators that are not inside brackets."""
    parts, depth, at = [], 0, 0
    pattern = re.compile(f"(?P<bracket>{_BRACKET.pattern})|(?P<cut>{separator.pattern})")
    for token in pattern.finditer(text):
        if token["bracket"]:
            depth += _step(token[0])
        elif depth == 0:
            parts.append(text[at : token.start()])
            at = token.end()
    return [*parts, text[at:]]


_RATIONAL = re.compile(
    rf"([-+]?)\s*(?:\\frac\{{\s*(-?\d{{1,{MAX_DIGITS}}})\s*\}}\{{\s*(-?\d{{1,{MAX_DIGITS}}})\s*\}}"
    rf"|(\d{{0,{MAX_DIGITS}}})(?:\.(\d{{1,{MAX_DIGITS}}})|\.)?(?:\s*/\s*(\d{{1,{MAX_DIGITS}}}))?)",
    re.ASCII,
)


def is_no_rounding(value: Any, decimal: Any, digits: str) -> Any:
    """Return whether a decimal is neither a rounding nor a truncation of a value.

    Args:
        value, decimal: exact numbers of the same kind, such as fractions.
        digits: the decimal as written.
    """
    unit = Fraction(1, 10 ** len(digits.partition(".")[2]))
    is_cut_off = abs(decimal) <= abs(value) and decimal * value >= 0
    return abs(value - decimal) >= unit if is_cut_off else abs(value - decimal) > unit / 2


def as_number(text: str) -> Fraction | None:
    """Return the exact value of an integer, a decimal or a quotient of two of these; None for other text."""
    match = _RATIONAL.fullmatch(text.strip())
    if match is None:
        return None
    sign, above, below, whole, decimals, divisor = match.groups()
    if above is None and not whole and not decimals:
        return None
    value = Fraction(above) if above is not None else Fraction(f"{whole or '0'}.{decimals or '0'}")
    divisor = int(below or divisor or 1)
    if divisor == 0:
        return None
    return (-value if sign == "-" else value) / divisor
