"""Where the paths in a configuration lead: from the current directory, from its own file, or from the repository."""

import os
import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from roll_opd.base.failures import file_kind, os_sentence

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
_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = _PACKAGE / "shipped"  # made by setup.py, in an installed package alone
# what has `configs/` and `examples/` in it: the repository, or what an installed package brings of it
REPOSITORY = SHIPPED if SHIPPED.is_dir() else _PACKAGE.parent
_beside: ContextVar[tuple[Path, ...]] = ContextVar("_beside", default=())


class PathError(ValueError):
    """A path cannot be looked at; the message says which, why and what to do."""


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

    From here comes first, as in ROLL. An absolute path leads to itself. PathError where `text` can be no path.
    """
    given = expanded(text)
    return [given] if given.is_absolute() else [place / given for place in (Path(), *_beside.get(), REPOSITORY)]


def expanded(text: str) -> Path:
    """Return the path that `text` means, with `~` and `~user` replaced. PathError where it can mean none."""
    if not text.strip():
        raise PathError("the path is empty; write one")
    if "\0" in text:
        raise PathError(f"{text!r} has a NUL character in it, which no path has; remove it")
    found = os.path.expanduser(text)
    if text.startswith("~") and found == text:
        home = Path(text).parts[0]
        raise PathError(f"{text}: there is no home directory {home}; write the path without it")
    return Path(found)


def find_path(text: str) -> Path | None:
    """Return the existing path that `text` means, the first of `candidates`.

    PathError where that cannot be seen: a directory may not be entered, a name is too long, ...
    """
    for candidate in candidates(text):
        try:
            if candidate.exists():
                return candidate.resolve()
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise PathError(os_sentence(error) if isinstance(error, OSError) else f"{text}: {error}") from None
    return None


def regular_file(path: Path) -> Path:
    """Return `path` where it is a regular file, which can be read from its beginning again. PathError for others."""
    try:
        path.stat()  # an OSError where there is nothing
        if path.is_file() and not path.resolve().is_relative_to("/proc"):  # whose files may wait for ever
            return path
        raise PathError(f"{path} is {file_kind(path)}, which cannot be read twice; give a regular file")
    except OSError as error:
        raise PathError(os_sentence(error)) from None


def content(path: Path) -> bytes:
    """Return what is in a regular file that should not be empty. PathError for others, which may never end."""
    try:
        if not regular_file(path).stat().st_size:
            raise PathError(f"{path} is empty; get it again")
        return path.read_bytes()
    except OSError as error:
        raise PathError(os_sentence(error)) from None


def places() -> str:
    """Name the directories from which relative paths are looked up."""
    return " or ".join(map(str, dict.fromkeys((Path.cwd(), *_beside.get(), REPOSITORY))))


def hub_hint(name: str, kind: str = "model") -> str | None:
    """Say how to get what may be the name of a model or data set (`kind`) on the Hugging Face Hub; None: it is none."""
    if not HUB_NAME.fullmatch(name) or Path(name).suffix in FILES:
        return None
    option = "" if kind == "model" else f" --repo-type {kind}"
    return f"if it is the name of a {kind} on the Hugging Face Hub, run hf download {name}{option} --local-dir {name}"


def use_cache_of_compilers(environ: MutableMapping[str, str]) -> None:
    """Set the cache directory of torch's compiler to the user's cache, unless the environment sets another.

    The default, which stays in use if the user's cache is not writable, is a directory in TMPDIR that is never removed.
    """
    home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directory = Path(home, "roll_opd", "torchinductor")
    if "TORCHINDUCTOR_CACHE_DIR" in environ or not directory.is_absolute():
        return
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
