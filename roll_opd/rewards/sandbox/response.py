"""The program in a response."""

from collections.abc import Iterator

_PYTHON = ("", "python", "python3", "py")
_SOLUTION = "<|begin_of_solution|>"  # ROLL's models may write it before what counts
_THOUGHT = "</think>"


def answer_of(response: str) -> str:
    """Return what follows the thinking."""
    return response.rpartition(_SOLUTION)[2].rpartition(_THOUGHT)[2]


def program_of(response: str) -> str | None:
    """Return the last fenced Python block of the answer; None where there is none, or an empty one."""
    last = None
    for language, code in _blocks(answer_of(response)):
        if language in _PYTHON:
            last = code
    return last if last and last.strip() else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language in lower case, code) of each block between two lines that start with a fence.

    It goes by lines, in time linear in the text; a regular expression could go back and forth over it.
    """
    language: str | None = None
    code: list[str] = []
    for line in text.split("\n"):
        start = line.strip()
        if not start.startswith("```"):
            code.append(line)
        elif language is None:
            language, code = (start[3:].split() or [""])[0].lower(), []
        else:
            yield language, "\n".join(code) + "\n"
            language = None
