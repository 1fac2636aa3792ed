"""Reads the code blocks of a page of docs/, for tests that run them."""

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```(\w+)( untested)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks in `language` on a page, in order, without blocks marked as untested."""
    found = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    return [text for name, untested, text in found if name == language and not untested]


def commands(page: str) -> list[list[str]]:
    """Return the commands on a page, in order, split into words."""
    return [shlex.split(line) for text in blocks(page, "sh") for line in text.splitlines()]
