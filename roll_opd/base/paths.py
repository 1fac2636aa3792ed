"""Resolve paths of a configuration relative to the current directory, the configuration file, or the repository."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from roll_opd.base.failures import file_kind, os_sentence

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
)  # suffixes of files, not of Hub repositories
_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = _PACKAGE / "shipped"  # created by setup.py in an installed package
# directory that has `configs/` and `examples/`: the repository, or their copy in an installed package
REPOSITORY = SHIPPED if SHIPPED.is_dir() else _PACKAGE.parent
_beside: ContextVar[tuple[Path, ...]] = ContextVar("_beside", default=())


class PathError(ValueError):
    """A path cannot be read. The message states the path, the reason and the remedy."""


@contextmanager
def also_resolving_in(directory: Path) -> Iterator[None]:
    """Resolve relative paths also in `directory`, while the `with` block runs.

    `directory` is the directory of the configuration file.
    """
    token = _beside.set((directory,))
    try:
        yield
    finally:
        _beside.reset(token)


def report_temp_directory() -> None:
    """Print a warning if TMPDIR is set and cannot be used. Python then uses another directory without a message."""
    given, used = os.environ.get("TMPDIR"), tempfile.gettempdir()
    if given and os.path.abspath(given) != used:
        can_be_written = os.access(given, os.W_OK | os.X_OK)
        why = ("is full" if can_be_written else "cannot be written") if os.path.isdir(given) else "is not a directory"
        print(
            f"TMPDIR: {given} {why}, so temporary files are in {used}; set TMPDIR to another directory", file=sys.stderr
        )


def plain_path(path: str) -> str:
    """Return a path of a directory for a library that may take the path for a pattern, an address or a name.

    vLLM searches for weights with `glob`, so it finds none below a directory such as `runs [1]`. A path with special
    characters is replaced by a link in TMPDIR.
    """
    if re.fullmatch(r"[\w./ +,=@~-]+", path):
        return path
    link = Path(tempfile.mkdtemp(prefix="roll_opd-"), "model")
    link.symlink_to(Path(path).resolve())
    return str(link)


def candidates(text: str) -> list[Path]:
    """Return the paths that `text` may name, in the order of the attempts.

    A relative path is tried in the current directory (as in ROLL), next to the configuration, and in the repository.

    Raises:
        PathError: if `text` cannot be a path.
    """
    given = expanded(text)
    return [given] if given.is_absolute() else [place / given for place in (Path(), *_beside.get(), REPOSITORY)]


def expanded(text: str) -> Path:
    """Return the path `text` with `~` and `~user` expanded; raise PathError if `text` cannot be a path."""
    if not text.strip():
        raise PathError("the path is empty; set a path")
    if "\0" in text:
        raise PathError(f"{text!r} has a NUL character, which paths cannot have; remove it")
    found = os.path.expanduser(text)
    if text.startswith("~") and found == text:
        home = Path(text).parts[0]
        raise PathError(f"{text}: there is no home directory {home}; write the path without it")
    return Path(found)


def find_path(text: str) -> Path | None:
    """Return the first of the `candidates` that exists; None if none exists.

    Raises:
        PathError: if the system cannot check a path, for example because its name is too long.
    """
    for candidate in candidates(text):
        try:
            if candidate.exists():
                return candidate.resolve()
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise PathError(os_sentence(error) if isinstance(error, OSError) else f"{text}: {error}") from None
    return None


def regular_file(path: Path) -> Path:
    """Return `path` if it is a regular file; raise PathError otherwise.

    Other kinds of files are rejected, because some of them can be read only once.
    """
    try:
        path.stat()  # raises OSError if missing
        if path.is_file() and not path.resolve().is_relative_to("/proc"):  # files of /proc may block forever
            return path
        raise PathError(f"{path} is {file_kind(path)}, which cannot be read twice; use a regular file")
    except OSError as error:
        raise PathError(os_sentence(error)) from None


def is_hidden(path: Path) -> bool:
    """Return whether a part of a relative path begins with a point, such as `._rows.jsonl` or `.ipynb_checkpoints`.

    Systems and editors write such files next to the files of a user.
    """
    return any(part.startswith(".") for part in path.parts)


def content(path: Path) -> bytes:
    """Return the content of a regular file; raise PathError if the file is empty or not regular."""
    try:
        if not regular_file(path).stat().st_size:
            raise PathError(f"{path} is empty; download it again")
        return path.read_bytes()
    except OSError as error:
        raise PathError(os_sentence(error)) from None


def places() -> str:
    """Return the directories in which relative paths are resolved, as text for error messages."""
    return " or ".join(map(str, dict.fromkeys((Path.cwd(), *_beside.get(), REPOSITORY))))


def user_cache() -> Path:
    """Return this package's directory in the user's cache. The directory may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "roll_opd")


def use_cache_of_compilers(environ: MutableMapping[str, str]) -> None:
    """Set the cache directory of torch's compiler to a directory in the user's cache.

    torch's default is a directory in TMPDIR that is never removed. The default is kept if the user's cache is not
    writable. If the environment already sets a directory, it is not changed.
    """
    home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directory = Path(home, "roll_opd", "torchinductor")
    if "TORCHINDUCTOR_CACHE_DIR" in environ or not directory.is_absolute():
        return
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
