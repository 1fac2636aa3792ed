"""Where the paths in a configuration lead: from the current directory, or from the repository."""

import re
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name
FILES = (
    ".json",
    ".jsonl",
    ".parquet",
    ".csv",
    ".tsv",
    ".txt",
    ".gz",
    ".yaml",
    ".py",
    ".safetensors",
)  # no repository is called so
REPOSITORY = Path(__file__).resolve().parents[1]


def find_path(text: str) -> Path | None:
    """Return the existing path that `text` means, from the current directory or the repository root."""
    given = Path(text).expanduser()
    for candidate in (given, REPOSITORY / given):
        if candidate.exists():
            return candidate.resolve()
    return None


def places() -> str:
    """Name the directories from which relative paths are looked up."""
    here = Path.cwd()
    return str(here) if here == REPOSITORY else f"{here} or {REPOSITORY}"


def hub_hint(name: str, kind: str = "model") -> str | None:
    """Say how to get what may be the name of a model or data set (`kind`) on the Hugging Face Hub; None: it is none."""
    if not HUB_NAME.fullmatch(name) or Path(name).suffix in FILES:
        return None
    option = "" if kind == "model" else f" --repo-type {kind}"
    return f"if it is the name of a {kind} on the Hugging Face Hub, run hf download {name}{option} --local-dir {name}"
