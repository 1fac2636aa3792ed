"""Where the paths in a configuration lead: from the current directory, from its own file, or from the repository."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
SHIPPED = _PACKAGE / "shipped"  # made by setup.py, in an installed package alone
# what has `configs/` and `examples/` in it: the repository, or what an installed package brings of it
REPOSITORY = SHIPPED if SHIPPED.is_dir() else _PACKAGE.parent
_beside: ContextVar[tuple[Path, ...]] = ContextVar("_beside", default=())


@contextmanager
def looking_beside(directory: Path) -> Iterator[None]:
    """Have relative paths looked up in `directory`, too, inside the `with` block: that of the configuration's file."""
    token = _beside.set((directory,))
    try:
        yield
    finally:
        _beside.reset(token)


def candidates(text: str) -> list[Path]:
    """Return where `text` may lead, first choice first: from here, from the configuration's file, from the repository.

    From here comes first, as in ROLL. An absolute path leads to itself.
    """
    given = Path(text).expanduser()
    return [given] if given.is_absolute() else [place / given for place in (Path(), *_beside.get(), REPOSITORY)]


def find_path(text: str) -> Path | None:
    """Return the existing path that `text` means, the first of `candidates`."""
    return next((candidate.resolve() for candidate in candidates(text) if candidate.exists()), None)


def places() -> str:
    """Name the directories from which relative paths are looked up."""
    return " or ".join(map(str, dict.fromkeys((Path.cwd(), *_beside.get(), REPOSITORY))))
