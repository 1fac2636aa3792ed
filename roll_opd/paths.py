"""Where the paths in a configuration lead: from the current directory, or from the repository."""

from pathlib import Path

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
