"""Extract the program from a response: parse the fenced code blocks and choose one of them.

Blocks marked as Python take precedence over unmarked blocks. Blocks marked as another language are never run.
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
    """Return the answer in a response: the text after the thoughts and after the mark `_SOLUTION`."""
    return after_thoughts(response.rpartition(_SOLUTION)[2])


def program_of(response: str, called: Collection[str] = ()) -> str | None:
    """Return the program of the answer; None if the answer has no code block.

    The program is the last block of the first kind that the answer has: blocks marked as Python, unmarked blocks with
    statements, other unmarked blocks.

    Args:
        called: names of functions and classes that the tests call. The last block that defines one of them is
            preferred, so that a usage example after the solution is not mistaken for the solution.
    """
    blocks = [block for block in fenced_blocks(answer_of(response)) if block.code.strip()]
    marked = [block.code for block in blocks if _PYTHON.match(block.info)]
    unmarked = [block.code for block in blocks if not block.info]
    found = [code for code in marked if not _SESSION.match(code)] or marked
    found = found or [code for code in unmarked if _STATEMENT.search(code)] or unmarked
    defining = [code for code in found if any(name in called for pair in _DEFINED.findall(code) for name in pair)]
    return next(reversed(defining or found), None)


def fenced_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced code blocks of a text, by the rules of CommonMark.

    Blocks in lists and quotes are found too. The last block may be unclosed. The text is read line by line, in linear
    time. A regular expression could take longer, because it could backtrack.
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
    """Return whether a line closes a code block.

    A closing fence is at least as long as the opening fence and has no info string.
    """
    start = line.strip()
    return len(start) >= len(fence) and not start.strip(fence[0]) and len(line) - len(line.lstrip()) <= 3


def _without_quotes(line: str, quotes: int) -> tuple[str, bool]:
    """Return (line without the quote markers around a block, whether the line is inside the quotes).

    Args:
        quotes: number of quote markers around the block.
    """
    for _ in range(quotes):
        start = line.lstrip(" ")
        if not start.startswith(">"):
            return line, False
        line = start[1:].removeprefix(" ")
    return line, True


def _dedented(line: str, width: int) -> str:
    """Return a line with its indentation reduced by at most `width` columns."""
    start = line.lstrip(" \t")
    indentation = line[: len(line) - len(start)]
    if "\t" in indentation and width:
        indentation = indentation.expandtabs(4)
    return indentation[width:] + start
