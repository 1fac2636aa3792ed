"""Extract the program from a response: parse the fenced code blocks and choose one block.

Blocks marked as Python take precedence over unmarked blocks; blocks marked as other languages are never run.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from roll_opd.base.thoughts import after_thoughts

_SOLUTION = "<|begin_of_solution|>"  # ROLL's models may write it before the solution

# A fence after the markers of its quotes and list items. The info string of a backtick fence has no backticks.
_FENCE = re.compile(
    r"(?P<lead>(?:[ \t]*(?:>|(?:[-*+]|\d{1,9}[.)])(?=[ \t])))*[ \t]*)(?P<fence>`{3,}(?=[^`]*\Z)|~{3,})(?P<info>.*)"
)
# python, Python 3, py3, {.python}, {python}, python title="a.py", python:a.py, a.py
_PYTHON = re.compile(r"\{?\s*\.?(?:c?python|pypy|py)[\d.]*(?=[\s,:;{}(\[]|\Z)|[\w/-]+\.py(?=\s|\Z)", re.IGNORECASE)
_SESSION = re.compile(r"\s*(?:>>> |In \[)")  # an interactive session with its output
# a line of Python, as opposed to output or shell commands, in an unmarked block
_STATEMENT = re.compile(
    r"""
    ^[ \t]*
    (?: (?:import|from)[ ]\w
      | (?:def|class|for|while|if|with|async)\b[^\n]*:
      | (?:print|return|try|@\w)
      | \w[\w.,\[\] ]{0,80}=[^=\n]
      | [\w.]{1,80}\( )
    """,
    re.MULTILINE | re.VERBOSE,
)
_DEFINED = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*=", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced code block: its info string and its content."""

    info: str
    code: str


def answer_of(response: str) -> str:
    """Return the text after the thoughts."""
    return after_thoughts(response.rpartition(_SOLUTION)[2])


def program_of(response: str, called: Collection[str] = ()) -> str | None:
    """Return the program of the answer; None without a code block.

    It is the last block marked as Python, else the last unmarked block with statements, else the last unmarked block.
    If the tests call functions or classes (`called`), the last such block that defines one of these is preferred, so
    that a usage example after the solution is not mistaken for the solution.
    """
    blocks = [block for block in fenced_blocks(answer_of(response)) if block.code.strip()]
    marked = [block.code for block in blocks if _PYTHON.match(block.info)]
    unmarked = [block.code for block in blocks if not block.info]
    found = [code for code in marked if not _SESSION.match(code)] or marked
    found = found or [code for code in unmarked if _STATEMENT.search(code)] or unmarked
    defining = [code for code in found if any(name in called for pair in _DEFINED.findall(code) for name in pair)]
    return next(reversed(defining or found), None)


def fenced_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced code blocks by CommonMark's rules, also in lists and quotes; the last block may be unclosed.

    The text is read line by line, in linear time. A regular expression could take longer, because it could backtrack.
    """
    fence, info, width, quotes = "", "", 0, 0
    code: list[str] = []
    for line in re.split(r"\r\n|\n|\r", text):
        if not fence:
            if opened := _FENCE.fullmatch(line):
                lead, fence, info = opened["lead"].expandtabs(4), opened["fence"], opened["info"].strip()
                quotes, code = lead.count(">"), []
                width = len(lead.rpartition(">")[2]) - (1 if quotes and lead[-1] == " " else 0)
            continue
        inside, is_inside = _without_quotes(line, quotes)
        content = _dedented(inside, width)
        if is_inside and not _closes(content, fence):
            code.append(content)
        else:
            yield Block(info, _joined(code))
            fence = ""
    if fence:
        yield Block(info, _joined(code))


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _closes(line: str, fence: str) -> bool:
    """Return whether a line is a closing fence: at least as long as the opening fence, without an info string."""
    start = line.strip()
    return len(start) >= len(fence) and not start.strip(fence[0]) and len(line) - len(line.lstrip()) <= 3


def _without_quotes(line: str, quotes: int) -> tuple[str, bool]:
    """Return a line without the quote markers around a block, and whether the line is inside of the quotes."""
    for _ in range(quotes):
        start = line.lstrip(" ")
        if not start.startswith(">"):
            return line, False
        line = start[1:].removeprefix(" ")
    return line, True


def _dedented(line: str, width: int) -> str:
    """Return a line without up to `width` columns of indentation."""
    start = line.lstrip(" \t")
    indentation = line[: len(line) - len(start)]
    if "\t" in indentation and width:
        indentation = indentation.expandtabs(4)
    return indentation[width:] + start
