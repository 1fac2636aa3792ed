"""Prompt files for the tests in this directory."""

import json
from pathlib import Path


def write(path: Path, *lines: object) -> Path:
    """Write a JSONL file; a text is written as an unchanged line, any other value as JSON."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return path
