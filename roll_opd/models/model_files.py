"""Read the JSON files and safetensors headers of a Hugging Face model directory, and choose its weight files.

A directory may have two sets of weights. For example, `save_pretrained` into the directory of a sharded model does not
delete the old index. transformers loads model.safetensors if it exists, but vLLM loads the files of the index. So an
error is raised if both sets are complete and differ.

A download may also leave links to deleted files. Each error names the file and the remedy.
"""

import json
import math
import operator
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_opd.base.hub import name_of
from roll_opd.base.paths import PathError, content

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
TEXT_PREFIX = "model.language_model."  # prefix of the decoder's tensors in a multimodal checkpoint
KEPT = ("model.visual.", "mtp.")  # vision encoder, multi-token prediction (see `is_kept`)
IN_A_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
PIECES, PIECE_BYTES = 16, 4096  # compared pieces of a tensor


# model_type of multimodal checkpoints whose text model can be trained -> model_type of the text model
MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def decoder_name(name: str) -> str:
    """Return the name of a tensor in a checkpoint that contains only the text model."""
    return name.replace(TEXT_PREFIX, "model.", 1) if name.startswith(TEXT_PREFIX) else name


def is_kept(name: str, layers: int) -> bool:
    """Return whether a tensor is exported unchanged.

    A model with `layers` layers neither loads nor trains such a tensor. It belongs to the vision encoder or to
    multi-token prediction. DeepSeek-V3 and GLM-4.5 store the layers for multi-token prediction after the last layer.
    """
    in_a_layer = IN_A_LAYER.match(name)
    return name.startswith(KEPT) or (in_a_layer is not None and int(in_a_layer[1]) >= layers)


def decoder_prefix(names: Iterable[str]) -> str:
    """Return the prefix of the decoder's tensors in a checkpoint.

    `names`: names of all tensors in the checkpoint.
    """
    return TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in names) else "model."


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text model from a multimodal config.json.

    Other configurations are returned unchanged.
    """
    text, model_type = config.get("text_config"), MULTIMODAL.get(str(config.get("model_type")))
    if not isinstance(text, dict) or model_type is None:
        return config
    rest = {key: value for key, value in config.items() if key not in ("text_config", "vision_config", "model_type")}
    # transformers ties the weights if either key is set
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return rest | text | {"tie_word_embeddings": tied, "model_type": model_type}


@dataclass(frozen=True)
class StoredTensor:
    """Header entry of a tensor: file, dtype, shape and byte range."""

    file: Path
    dtype: str  # the format's name, such as BF16
    shape: tuple[int, ...]
    start: int  # offset of the first byte in the file
    end: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return {tensor name: header entry} of a safetensors file. Raises ModelFilesError if the file is damaged."""
    with file.open("rb") as stream:
        start = stream.read(8)
        if not start:
            raise ModelFilesError(f"{file.name} is empty (0 bytes); download it again")
        if is_pointer(file):
            raise ModelFilesError(pointer_sentence(file))
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ModelFilesError(f"{file.name} is not a safetensors file, or is truncated; download it again")
        try:
            tensors = {
                name: _stored_tensor(file, value, 8 + size)
                for name, value in json.loads(stream.read(size)).items()
                if name != "__metadata__"
            }
            if not 0 <= sum(math.prod(tensor.shape) for tensor in tensors.values()) < 2**63:
                raise ValueError("too many weights")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
            raise ModelFilesError(f"{file.name} has a damaged header; download it again") from None
    needed = max((tensor.end for tensor in tensors.values()), default=8 + size)
    size = file.stat().st_size
    if size != needed:
        what = "is truncated" if size < needed else "has bytes after its last tensor"
        raise ModelFilesError(f"{file.name} {what}: {size} of {needed} bytes; download it again")
    return tensors


def _stored_tensor(file: Path, value: dict[str, Any], data: int) -> StoredTensor:
    start, end = value["data_offsets"]
    return StoredTensor(file, str(value["dtype"]), tuple(map(operator.index, value["shape"])), data + start, data + end)


def differ(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether the sampled pieces of two tensors differ.

    The tensors must have the same shape. If their dtypes differ, the result is False.
    """
    return one.dtype == other.dtype and any(
        left != right for left, right in zip(pieces(one), pieces(other), strict=True)
    )


def pieces(tensor: StoredTensor, count: int = PIECES) -> list[bytes]:
    """Read up to `count` pieces of a tensor's bytes, spread evenly from its first to its last byte."""
    size = tensor.end - tensor.start
    last, count = max(0, size - PIECE_BYTES), min(count, -(-size // PIECE_BYTES))
    with tensor.file.open("rb") as stream:
        found = []
        for piece in range(count):
            place = last * piece // max(1, count - 1)
            stream.seek(tensor.start + place - place % 8)  # aligned, so that no number is split
            found.append(stream.read(min(PIECE_BYTES, size)))
        return found


POINTER = b"version https://git-lfs.github.com/spec/"  # start of a git-LFS pointer file


class ModelFilesError(Exception):
    """A model directory is unusable. The message states the reason and the remedy."""


def is_pointer(file: Path) -> bool:
    """Return whether `file` is a git-LFS pointer."""
    with file.open("rb") as stream:
        return stream.read(len(POINTER)) == POINTER


def pointer_sentence(file: Path) -> str:
    """Return the error message for a git-LFS pointer."""
    return f"{file} is a git-LFS pointer, not the file itself; run `git lfs pull` in {file.parent}"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises ModelFilesError if the file cannot be read or does not contain an object. The message names the file.
    """
    try:
        found = content(path)
        if found.startswith(POINTER):
            raise ModelFilesError(pointer_sentence(path))
        value = json.loads(found.decode("utf-8"))
    except PathError as error:
        raise ModelFilesError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ModelFilesError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); download it again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} should contain a JSON object")
    return value


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_NAMED = 3  # files in a message


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model, or () for a directory without weights, or a part of them from a hub.

    Raises ModelFilesError if the weights are incomplete, if they are in another file format, or if there are two sets
    that differ.
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
    present = sorted(file.name for file in path.glob("*.safetensors") if not file.name.startswith(("adapter_", ".")))
    missing = [file for file in shards if not file.is_file()]
    if missing and name_of(path):
        return ()  # a part of a download; a run continues it
    if missing:
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
    """Return an error message if the index of a model is stale, otherwise None.

    With a stale index, vLLM does not start. transformers does not read the index if model.safetensors exists.
    """
    shards = _shards(path)
    if not shards or path / SINGLE in shards or not (path / SINGLE).is_file() or _are_complete(shards):
        return None
    return (
        f"{path / INDEX} is stale: some of its files, such as {shards[0].name}, are missing or damaged."
        f" transformers loads {SINGLE}, but vLLM would not start; remove the index (rm {path / INDEX})"
    )


def stored_tensors(path: Path, files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Return {name: header entry} of every tensor of a model.

    If several files contain a name, the index decides. Raises ModelFilesError if a file is damaged or truncated, or if
    a tensor is not in the file that the index names.

    Args:
        path: the model directory.
        files: its weight files. Only their headers are read.
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
    """Return {tensor: file} from the index, or {} without an index.

    Raises ModelFilesError if the index is malformed.
    """
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
    """Raise ModelFilesError if the single file and the shards contain different weights.

    Only sampled pieces of each tensor are compared.
    """
    one, other = read_header(single), stored_tensors(path, shards)
    name = next(
        (name for name in sorted(one.keys() | other.keys()) if not _are_same(one.get(name), other.get(name))), None
    )
    if name:
        raise ModelFilesError(
            f"{SINGLE} and the files of {INDEX} are both complete and differ ({name});"
            f" transformers loads {SINGLE}, vLLM loads the others. Remove the outdated set: the index and its files, or"
            f" {SINGLE}"
        )


def _are_same(one: StoredTensor | None, other: StoredTensor | None) -> bool:
    if one is None or other is None:
        return False
    return one.shape == other.shape and one.dtype == other.dtype and not differ(one, other)


def _named(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


_DTYPE_KEYS = ("torch_dtype", "dtype")


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a copy of a config.json with another dtype.

    All existing dtype keys are set, also in the configurations of inner models. If there is none, `dtype` is added.

    transformers 5 writes `dtype` but also reads `torch_dtype`. If only one of two existing keys were set, different
    programs could read different dtypes.
    """
    keys = [key for key in _DTYPE_KEYS if key in config] or ["dtype"]
    inner = {
        key: with_dtype(value, dtype)
        for key, value in config.items()
        if key.endswith("_config") and isinstance(value, dict) and any(name in value for name in _DTYPE_KEYS)
    }
    return {**config, **inner, **dict.fromkeys(keys, dtype)}
