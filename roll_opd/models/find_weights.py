"""Find the weight files of a model directory, with transformers' choice between several sets.

Tools leave more than one set: `save_pretrained` over a sharded model keeps the old index, a download keeps links to
deleted files. transformers loads model.safetensors if it exists, vLLM the files of the index. Two complete sets that
differ are ambiguous.
"""

from pathlib import Path

from roll_opd.models.json_files import ModelFilesError, read_json
from roll_opd.models.safetensors_headers import StoredTensor, differ, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_NAMED = 3  # files in a message


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model; empty for a directory without weights.

    Raises ModelFilesError for incomplete weights, other file formats, and two sets that differ.
    """
    single, shards = path / SINGLE, _shards(path)
    if single.is_file():
        if shards and single not in shards and _are_complete(shards):
            _check_same(path, single, shards)
        return shards if single in shards else (single,)
    for file in (single, *shards):
        if file.is_symlink() and not file.exists():
            raise ModelFilesError(
                f"{file} is a broken link to {file.readlink()}; download the model again, or copy it with its targets"
                " (cp -rL)"
            )
    present = sorted(file.name for file in path.glob("*.safetensors") if not file.name.startswith("adapter_"))
    if missing := [file for file in shards if not file.is_file()]:
        others = [name for name in present if path / name not in shards]
        instead = f" (found {_named(others)}, which is not in the index)" if others else ""
        raise ModelFilesError(
            f"weight file {missing[0].name} of the index is missing{instead}; download it again, or remove"
            f" {INDEX} if it belongs to other weights"
        )
    if shards:
        return shards
    if present:
        raise ModelFilesError(
            f"found {_named(present)}, but neither {SINGLE} nor {INDEX}; download the index, or rename a file with the"
            f" complete model to {SINGLE}"
        )
    if any(path.glob("pytorch_model*.bin")):
        raise ModelFilesError(
            "the weights are in .bin form only; save the model again with save_pretrained() for safetensors"
        )
    return ()


def engine_problem(path: Path) -> str | None:
    """Return an error for a model with a stale index, which transformers ignores and vLLM reads; else None."""
    shards = _shards(path)
    if not shards or path / SINGLE in shards or not (path / SINGLE).is_file() or _are_complete(shards):
        return None
    return (
        f"{path / INDEX} is stale: some of its files, such as {shards[0].name}, are missing or damaged."
        f" transformers loads {SINGLE}, vLLM would not start; remove the index (rm {path / INDEX})"
    )


def stored_tensors(path: Path, files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Return every tensor of the model in `path` by name, from the headers of its weight `files`.

    For a name in several files, the index decides. Raises ModelFilesError for damaged or truncated files, and for a
    tensor that the index names and its file lacks.
    """
    headers = {str(file.relative_to(path)): read_header(file) for file in files}
    found = {name: tensor for header in headers.values() for name, tensor in header.items()}
    for name, file in _weight_map(path).items():
        if file not in headers:
            continue  # an ignored index
        if name not in headers[file]:
            raise ModelFilesError(f"{file} lacks tensor {name} of the index; download both files again")
        found[name] = headers[file][name]
    return found


def _shards(path: Path) -> tuple[Path, ...]:
    return tuple(path / name for name in sorted(set(_weight_map(path).values())))


def _weight_map(path: Path) -> dict[str, str]:
    """Return tensor -> file from the index; empty without one. Raises ModelFilesError for a malformed index."""
    if not (path / INDEX).is_file():
        return {}
    names = read_json(path / INDEX).get("weight_map", {})
    if not isinstance(names, dict) or not all(isinstance(name, str) and name for name in names.values()):
        raise ModelFilesError(f"weight_map in {INDEX} should map each weight to a file name; download it again")
    return names


def _are_complete(shards: tuple[Path, ...]) -> bool:
    try:
        return all([file.is_file() and bool(read_header(file)) for file in shards])
    except ModelFilesError:
        return False


def _check_same(path: Path, single: Path, shards: tuple[Path, ...]) -> None:
    """Raise ModelFilesError if the single file and the shards differ; compares pieces of each tensor."""
    one, other = read_header(single), stored_tensors(path, shards)
    name = next(
        (name for name in sorted(one.keys() | other.keys()) if not _are_same(one.get(name), other.get(name))), None
    )
    if name:
        raise ModelFilesError(
            f"{SINGLE} and the files of {INDEX} are both complete and differ ({name});"
            f" transformers loads {SINGLE}, vLLM the others. Remove the outdated set: the index and its files, or"
            f" {SINGLE}"
        )


def _are_same(one: StoredTensor | None, other: StoredTensor | None) -> bool:
    if one is None or other is None:
        return False
    return one.shape == other.shape and one.dtype == other.dtype and not differ(one, other)


def _named(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
