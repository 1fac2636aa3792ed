"""The clients of the hubs: huggingface_hub, and modelscope where the environment selects it.

Every error of a client becomes a HubError: one sentence with the name, the reason and the remedy.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roll_opd.base import hub
from roll_opd.base.hub import Download, HubError, HubName

FULL = (errno.ENOSPC, errno.EDQUOT)
SERVER_ERROR, TOO_MANY = 500, 429


def listing(name: HubName) -> tuple[str, dict[str, int]]:
    """Return (commit, {file: bytes}) of a repository."""
    with _sentences(name):
        if hub.is_on_modelscope(name):
            return _listing_on_modelscope(name)
        from huggingface_hub import HfApi

        found: Any = HfApi(**_account()).repo_info(
            name.id, repo_type=name.kind, revision=name.wanted or None, files_metadata=True, timeout=30
        )
        return str(found.sha), {file.rfilename: file.size or 0 for file in found.siblings or ()}


def fetched(wanted: Sequence[Download]) -> dict[HubName, Path]:
    """Download files into the cache; return the directory of each name."""
    return {one.name: _fetched(one) for one in wanted}


def _fetched(wanted: Download) -> Path:
    name = wanted.name
    with _sentences(name):
        if hub.is_on_modelscope(name):
            return _from_modelscope(wanted)
        from huggingface_hub import snapshot_download

        # not the commit of a branch: the client records the commit of the branch
        found = snapshot_download(
            name.id,
            repo_type=name.kind,
            revision=name.wanted or None,
            allow_patterns=[*wanted.files],
            cache_dir=hub.hub_cache(),
            **_account(),
        )
        return Path(found).resolve()


def _account() -> dict[str, Any]:
    """Return the endpoint and the token in the environment now; the client has read them when it was imported."""
    return {"endpoint": os.environ.get("HF_ENDPOINT") or None, "token": os.environ.get("HF_TOKEN") or None}


def _listing_on_modelscope(name: HubName) -> tuple[str, dict[str, int]]:
    api = _modelscope("modelscope.hub.api", name).HubApi()
    revision = name.wanted or hub.MASTER
    files = api.get_model_files(name.id, revision=revision, recursive=True)
    return revision, {file["Path"]: file["Size"] or 0 for file in files if file.get("Type") != "tree"}


def _from_modelscope(wanted: Download) -> Path:
    client, name = _modelscope("modelscope.hub.snapshot_download", wanted.name), wanted.name
    found = client.snapshot_download(name.id, revision=name.wanted or hub.MASTER, allow_patterns=[*wanted.files])
    return Path(found).resolve()


def _modelscope(module: str, name: HubName) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise HubError(
            f"{name}: the environment selects ModelScope (USE_MODELSCOPE, MODEL_DOWNLOAD_TYPE), but the package"
            f" modelscope cannot be imported ({error}); pip install modelscope, or set"
            " MODEL_DOWNLOAD_TYPE=HUGGINGFACE_HUB"
        ) from None


@contextmanager
def _sentences(name: HubName) -> Iterator[None]:
    """Raise every error of a client as a HubError."""
    try:
        yield
    except HubError:
        raise
    except ImportError as error:
        raise HubError(f"{name} needs the package huggingface_hub ({error}); pip install huggingface_hub") from error
    except Exception as error:  # the clients raise errors of several packages
        raise HubError(f"{name}: {_sentence(name, error)}") from error


def _sentence(name: HubName, error: BaseException) -> str:
    from huggingface_hub import errors as kinds

    address = hub.address_of(name)
    page = f"{address}/{'datasets/' if name.kind == 'dataset' else ''}{name.id}"
    if isinstance(error, kinds.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _sentence(name, error.__cause__)  # the client looks into the cache after an error of the hub
    if isinstance(error, kinds.GatedRepoError):
        return (
            f"the {name.kind} is gated ({_status(error)}); accept its conditions at {page}, and set HF_TOKEN to a token"
            " of that account"
        )
    if isinstance(error, kinds.RevisionNotFoundError):
        return f"the {name.kind} has no revision {name.wanted!r}; write a branch, a tag or a commit after @"
    if isinstance(error, kinds.RepositoryNotFoundError):
        return (
            f"{address} has no {name.kind} of this name for you ({_status(error)}), and there is no such path; correct"
            f" the name, or set HF_TOKEN if the {name.kind} is private"
        )
    if isinstance(error, kinds.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"{address} refuses the token ({_status(error)}); set HF_TOKEN to a valid token with read access"
        if status >= SERVER_ERROR or status == TOO_MANY:
            return f"{address} fails ({_status(error)}); start again later, files in the cache are kept"
        return f"{address} refuses the request ({_status(error)}): {_first_line(error)}; correct the name"
    system = _system_error(error)
    if system is not None and system.errno in FULL:
        free = hub.readable(hub.free_space(hub.cache_of(name)))
        return (
            f"the disk of {hub.cache_of(name)} is full ({free} free); free some space, or set HF_HOME to a directory"
            " on a larger disk, and start again: complete files are kept"
        )
    if isinstance(error, PermissionError):
        return f"{error.filename or hub.cache_of(name)} may not be written; set HF_HOME to a directory that may"
    return (
        f"the download from {address} failed ({type(error).__name__}: {_first_line(error)}); check the network, proxies"
        " and HF_ENDPOINT, and start again: complete files are kept"
    )


def _status(error: Any) -> str:
    return f"HTTP {error.response.status_code}"


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the error of the system that caused `error`, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        error = error.__cause__ or error.__context__
    return None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
