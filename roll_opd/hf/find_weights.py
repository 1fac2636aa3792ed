"""Which of a model directory's files hold its weights: transformers' choice, where several could.

Tools leave more than one set behind: `save_pretrained` over a sharded model keeps the old index, a download keeps links
to files that are gone. transformers loads model.safetensors where there is one, and vLLM what the index names; where
both sets are whole and differ, neither is meant for certain.
"""

from pathlib import Path

from roll_opd.hf.json_files import ModelFilesError, read_json
from roll_opd.hf.safetensors_headers import StoredTensor, differ, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMED = 3  # files that a sentence names


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model; none where there are no weights at all.

    Raises ModelFilesError for weights that are incomplete, in another form, or there twice and not the same.
    """
    single, shards = path / SINGLE, _shards(path)
    if single.is_file():
        if shards and single not in shards and _are_whole(shards):
            _check_same(path, single, shards)
        return shards if single in shards else (single,)
    for file in (single, *shards):
        if file.is_symlink() and not file.exists():
            raise ModelFilesError(
                f"{file} is a link to {file.readlink()}, which is not there; download the model again, or copy it with"
                " what its links point to (cp -rL)"
            )
    present = sorted(file.name for file in path.glob("*.safetensors") if not file.name.startswith("adapter_"))
    if missing := [file for file in shards if not file.is_file()]:
        others = [name for name in present if path / name not in shards]
        instead = f" (there is {_named(others)}, which it does not name)" if others else ""
        raise ModelFilesError(
            f"weight file {missing[0].name} that the index names is missing{instead}; download it again, or remove"
            f" {INDEX} where it is of other weights"
        )
    if shards:
        return shards
    if present:
        raise ModelFilesError(
            f"there is {_named(present)}, and neither {SINGLE} nor {INDEX}, by which weights are found; download the"
            f" index, or rename a file that holds the whole model to {SINGLE}"
        )
    if any(path.glob("pytorch_model*.bin")):
        raise ModelFilesError(
            "the weights are in .bin form only; save the model once more with save_pretrained() for safetensors"
        )
    return ()


def engine_problem(path: Path) -> str | None:
    """Return why vLLM cannot load a model that transformers loads: it believes a stale index. None: it can."""
    shards = _shards(path)
    if not shards or path / SINGLE in shards or not (path / SINGLE).is_file() or _are_whole(shards):
        return None
    return (
        f"{path / INDEX} is stale: some file that it names, such as {shards[0].name}, is missing or damaged."
        f" transformers loads {SINGLE}, vLLM would not start; remove the index (rm {path / INDEX})"
    )


def stored_tensors(path: Path, files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Return every tensor of the model in `path` by name, from the headers of its weight `files`.

    Of a name that several files have, the one where the index looks. Raises ModelFilesError for a damaged file, one
    that ends too early, and one that lacks a tensor that the index looks for there.
    """
    headers = {str(file.relative_to(path)): read_header(file) for file in files}
    found = {name: tensor for header in headers.values() for name, tensor in header.items()}
    for name, file in _weight_map(path).items():
        if file not in headers:
            continue  # of an index that does not count
        if name not in headers[file]:
            raise ModelFilesError(f"{file} has no tensor {name}, which the index looks for there; get both files again")
        found[name] = headers[file][name]
    return found


def _shards(path: Path) -> tuple[Path, ...]:
    return tuple(path / name for name in sorted(set(_weight_map(path).values())))


def _weight_map(path: Path) -> dict[str, str]:
    """Return tensor -> file as the index says; none without one. Raises ModelFilesError for one of another form."""
    if not (path / INDEX).is_file():
        return {}
    names = read_json(path / INDEX).get("weight_map", {})
    if not isinstance(names, dict) or not all(isinstance(name, str) and name for name in names.values()):
        raise ModelFilesError(f"weight_map in {INDEX} should give each weight the name of a file; get it again")
    return names


def _are_whole(shards: tuple[Path, ...]) -> bool:
    try:
        return all([file.is_file() and bool(read_header(file)) for file in shards])
    except ModelFilesError:
        return False


def _check_same(path: Path, single: Path, shards: tuple[Path, ...]) -> None:
    """Raise ModelFilesError where the one file and the shards hold other weights, from pieces of each tensor."""
    one, other = read_header(single), stored_tensors(path, shards)
    name = next(
        (name for name in sorted(one.keys() | other.keys()) if not _are_same(one.get(name), other.get(name))), None
    )
    if name:
        raise ModelFilesError(
            f"{SINGLE} and the files that {INDEX} names are both whole, and hold other weights ({name});"
            f" transformers loads {SINGLE}, vLLM the others. Remove the index and its files, or {SINGLE}, whichever is"
            " old"
        )


def _are_same(one: StoredTensor | None, other: StoredTensor | None) -> bool:
    if one is None or other is None:
        return False
    return one.shape == other.shape and one.dtype == other.dtype and not differ(one, other)


def _named(names: list[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
