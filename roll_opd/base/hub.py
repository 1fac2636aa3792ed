"""Names of models and data sets on a hub (the Hugging Face Hub or ModelScope): read, find in the cache, download.

A name is `owner/name` or `owner/name@revision`. A text that is an existing path is never a name. A download needs the
permission of `downloading`: without it, nothing here uses the network. `recording` collects the commits of the names
that were found, and `pinned` selects commits that an earlier part of a run has recorded.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from roll_opd.base.paths import FILES, PathError

Kind = Literal["model", "dataset"]
Choice = Callable[[Collection[str]], Collection[str]]  # selects files of a repository; raises HubError
NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
MASTER = "master"  # ModelScope's default branch
ON = ("1", "on", "yes", "true")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
MODELSCOPE = ("USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")
SELECTING = (*OFFLINE, *MODELSCOPE, "MODEL_DOWNLOAD_TYPE", "HF_ENDPOINT", "MODELSCOPE_ENDPOINT", "MODELSCOPE_CACHE")
# variables of the clients of the hubs, which they read when they are imported
VARIABLES = re.compile(
    r"HF_\w+|HUGGINGFACE\w+|MODELSCOPE_\w+|MODEL_DOWNLOAD_TYPE|(VLLM_)?USE_MODELSCOPE|TRANSFORMERS_OFFLINE"
)
SMALL = 2**16  # bytes that are downloaded without a child process
SPARE = 2**26  # bytes that a download leaves free


class HubError(PathError):
    """A name cannot be found or downloaded. The message states the name, the reason and the remedy."""


@dataclass(frozen=True)
class HubName:
    """A name on a hub. Without a revision, it is the newest commit of the default branch."""

    kind: Kind
    id: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id

    @property
    def wanted(self) -> str:
        """The commit that `pinned` selects, or the revision as written."""
        return self.revision if COMMIT.fullmatch(self.revision) else _pins.get().get(str(self), self.revision)


@dataclass(frozen=True)
class Download:
    """Files of a repository. `place` is the place of the key in the configuration."""

    name: HubName
    files: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of the files that are not in the cache
    commit: str = ""
    key: str = ""
    place: str = ""

    @property
    def bytes(self) -> int:
        """Size of the files that are not in the cache."""
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Use:
    """A name that was found: its commit, and for a data set the files and the columns that are read."""

    commit: str
    reading: str = ""


_pins: ContextVar[Mapping[str, str]] = ContextVar("_pins", default=MappingProxyType({}))
_found: ContextVar["dict[str, Use] | None"] = ContextVar("_found", default=None)
_say: ContextVar[Callable[[str], None] | None] = ContextVar("_say", default=None)


@contextmanager
def environment(variables: Mapping[str, object]) -> Iterator[None]:
    """Set those of a configuration's variables that the hubs' clients read, while the `with` block runs."""
    changed = {name: str(value) for name, value in variables.items() if VARIABLES.fullmatch(name)}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def downloading(say: Callable[[str], None]) -> Iterator[None]:
    """Permit downloads while the `with` block runs. `say` gets the lines about their sizes."""
    token = _say.set(say)
    try:
        yield
    finally:
        _say.reset(token)


@contextmanager
def pinned(commits: Mapping[str, str]) -> Iterator[None]:
    """Use these commits for these names while the `with` block runs."""
    token = _pins.set({**_pins.get(), **commits})
    try:
        yield
    finally:
        _pins.reset(token)


@contextmanager
def recording() -> Iterator[dict[str, Use]]:
    """Collect the names that are found while the `with` block runs."""
    found: dict[str, Use] = {}
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


def record(name: HubName, commit: str, reading: str = "") -> None:
    """Add a name that was found to the dict of `recording`."""
    found = _found.get()
    if found is not None:
        before = found.get(str(name), Use(commit)).reading
        found[str(name)] = Use(commit, "; ".join(dict.fromkeys(filter(None, [before, reading]))))


def may_download() -> bool:
    """Return whether `downloading` permits downloads."""
    return _say.get() is not None


def hub_name(text: str, kind: Kind) -> HubName | None:
    """Return the name that `text` has the form of; None if it can only be a path."""
    found = NAME.fullmatch(text)
    if found is None or Path(found[1]).suffix in FILES:
        return None
    return HubName(kind, found[1], found[2] or "")


def is_offline() -> bool:
    """Return whether a variable of the environment forbids the network."""
    return any(os.environ.get(name, "").lower() in ON for name in OFFLINE)


def settings() -> dict[str, str]:
    """Return the variables that select the hub and the cache, without tokens, for another host."""
    found = {name: os.environ[name] for name in SELECTING if name in os.environ}
    return {**found, "HF_HUB_CACHE": str(hub_cache())}


def is_on_modelscope(name: HubName) -> bool:
    """Return whether the environment selects ModelScope for a model, by ROLL's or vLLM's variables."""
    chosen = os.environ.get("MODEL_DOWNLOAD_TYPE", "").upper()
    asked = chosen == "MODELSCOPE" or (not chosen and any(os.environ.get(one, "").lower() in ON for one in MODELSCOPE))
    return asked and name.kind == "model"


def hub_cache() -> Path:
    """Return the cache of huggingface_hub. The directory may not exist yet."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    found = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(found)))


def cache_of(name: HubName) -> Path:
    """Return the cache of the client of a name. The directory may not exist yet."""
    if is_on_modelscope(name):
        return Path(os.path.expanduser(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope"))
    return hub_cache()


def cached(name: HubName) -> Path | None:
    """Return the directory of a name in the cache; its files may be incomplete. None if there is none."""
    commit = name.wanted
    if is_on_modelscope(name):
        commit = commit or MASTER
    elif not COMMIT.fullmatch(commit):
        try:
            commit = (snapshot(name, "").parent / "refs" / (commit or "main")).read_text().strip()
        except OSError:
            return None
    found = snapshot(name, commit)
    return found.resolve() if commit and found.is_dir() else None


def snapshot(name: HubName, commit: str) -> Path:
    """Return the directory of a commit in the cache. It may not exist."""
    safe = name.id.replace("/", "--")
    if is_on_modelscope(name):
        return cache_of(name) / "models" / safe / "snapshots" / commit
    return cache_of(name) / f"{name.kind}s--{safe}" / "snapshots" / commit


def commit_of(path: Path) -> HubName | None:
    """Return the name and the commit of the model with the directory `path` in a cache; None otherwise."""
    repository = path.parent.parent.name.removeprefix("models--")
    if path.parent.name != "snapshots" or "--" not in repository:
        return None
    return HubName("model", repository.replace("--", "/", 1), path.name)


def name_of(path: Path) -> str | None:
    """Return the name of the model whose directory in the cache is `path`, with a short commit; None for others."""
    found = commit_of(path)
    return f"{found.id}@{found.revision[:8]}" if found else None


def title_of(path: Path) -> str:
    """Return a short name of a model's directory: the name on the hub without its owner, or the directory's name."""
    found = name_of(path)
    return found.partition("@")[0].partition("/")[2] if found else path.name


def absent(name: HubName, what: str) -> HubError:
    """Return the error about a name that is not in the cache and may not be downloaded now.

    `what` describes the files that a run downloads.
    """
    if is_offline():
        return offline(name)
    return HubError(
        f"{name} is neither a path nor in the cache ({cache_of(name)}), so a run downloads {what} from"
        f" {address_of(name)}; correct the path, or use plan --fetch, which downloads what a plan reads, no weights"
    )


def offline(name: HubName) -> HubError:
    """Return the error about a name that is not complete in the cache while the network is forbidden."""
    variable = next(one for one in OFFLINE if os.environ.get(one, "").lower() in ON)
    return HubError(
        f"{name} is not complete in the cache ({cache_of(name)}), and {variable} forbids downloads; unset {variable},"
        " set HF_HOME to a cache that has it, or give the path of a local directory"
    )


def address_of(name: HubName) -> str:
    """Return the address of the hub of a name, without credentials."""
    if is_on_modelscope(name):
        return os.environ.get("MODELSCOPE_ENDPOINT") or "https://www.modelscope.cn"
    return re.sub(r"//[^/@]*@", "//", os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def look_up(name: HubName, choose: Choice) -> Download:
    """Request the list of a repository's files; return the chosen files.

    Raises HubError, also if `downloading` has not permitted it.
    """
    from roll_opd.base import hub_clients  # the clients of the hubs take a second

    if is_offline():
        raise offline(name)
    if not may_download():
        raise absent(name, "its files")
    commit, sizes = hub_clients.listing(name)
    there = snapshot(name, commit)
    try:
        chosen = tuple(choose(sizes))
    except HubError as error:
        raise HubError(f"{name}: {error}") from None
    missing = {file: sizes[file] for file in chosen if not (there / file).is_file()}
    return Download(name, chosen, missing, commit)


def download(wanted: Sequence[Download]) -> list[Path]:
    """Download files, after a line with their sizes and the free disk space. Return the directory of each name.

    Files that are complete in the cache are kept, so that the next attempt continues. Raises HubError.
    """
    from roll_opd.base import hub_clients, hub_downloads

    say, total = _say.get(), sum(one.bytes for one in wanted)
    assert say is not None, "call it inside `downloading`"
    missing = [one for one in wanted if one.sizes]
    cache = cache_of(wanted[0].name)
    free = free_space(cache)
    for one in missing:
        say(f"Download {one.name} (commit {one.commit[:8]}): {len(one.sizes)} files, {readable(one.bytes)}")
    if missing:
        route = f"from {address_of(missing[0].name)} to {cache}"
        say(f"{readable(total)} in all, {route}, which has {readable(free)} free")
    if missing and total + SPARE > free:
        names = ", ".join(str(one.name) for one in missing)
        raise HubError(
            f"{names}: the download needs {readable(total)}, but {cache} has {readable(free)} free; free some"
            " space, or set HF_HOME to a directory on a larger disk"
        )
    there = [snapshot(one.name, one.commit).resolve() for one in wanted]
    # the client also records the commit of a branch
    rest = [
        one for one, path in zip(wanted, there, strict=True) if one.sizes or not one.files or cached(one.name) != path
    ]
    found = (hub_downloads.in_child if total > SMALL else hub_clients.fetched)(rest)
    return [found.get(one.name, path) for one, path in zip(wanted, there, strict=True)]


def free_space(path: Path) -> int:
    """Return the free bytes of the disk on which `path` is or would be."""
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free


def fetch(name: HubName, choose: Choice) -> Path:
    """Download the chosen files that are not in the cache. Return the directory of the name. Raises HubError."""
    return download([look_up(name, choose)])[0]


def readable(size: float) -> str:
    """Return a number of bytes as text."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.1f} GB" if size < 1000 else f"{size / 1000:.1f} TB"
