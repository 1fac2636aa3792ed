"""What a Hugging Face model directory says about itself: sizes, positions, weights. JSON only, no torch.

Parameter counts come from the headers of the safetensors files, which say every tensor's shape; where the
weights are not on this machine, from the sizes in config.json.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll_opd.paths import find_path, places

MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
)  # decoders that can be planned
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
FINGERPRINT_PIECES = 16
FINGERPRINT_BYTES = 65_536


class ModelFilesError(Exception):
    """A model directory cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of a decoder-only model, from config.json and the weight headers."""

    path: Path
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    experts: int  # 0: dense
    expert_intermediate: int  # MLP width of one expert
    parameters: int
    weight_files: tuple[Path, ...]  # empty: config.json only
    tensors: Mapping[str, "StoredTensor"] = field(default_factory=dict, repr=False)  # of the weight files, by name


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file, and what its header says of it."""

    file: Path
    dtype: str  # the format's name, such as BF16
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    end: int


def find_model(text: str) -> Path:
    """Return the local directory of a model: a path, or a Hub name that has already been downloaded.

    Raises ModelFilesError if there is none; nothing is ever downloaded.
    """
    found = find_path(text) or _in_hub_cache(text)
    if found is None:
        raise ModelFilesError(
            f"model {text!r} not found: no such directory from {places()}, and not in the Hugging Face cache; give the"
            " path of a local Hugging Face model directory"
        )
    if not found.is_dir():
        raise ModelFilesError(f"model {text!r} is a file; give the directory with config.json and the weights")
    return found


def _in_hub_cache(name: str) -> Path | None:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    repository = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot.resolve() if snapshot.is_dir() else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises ModelFilesError with file and line if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} should hold a JSON object")
    return value


def read_model(path: Path) -> ModelInfo:
    """Return what is known of the model in directory `path`. Raises ModelFilesError."""
    if not (path / "config.json").is_file():
        raise ModelFilesError(f"{path} has no config.json; it is not a Hugging Face model directory")
    config = read_json(path / "config.json")
    model_type = str(config.get("model_type", ""))
    if is_vision_config(config):
        raise ModelFilesError(
            f"{path} is a vision-language model ({model_type}); only text models can be distilled here"
        )
    if model_type not in MODEL_TYPES:
        raise ModelFilesError(
            f"{path} has model_type {model_type!r}, which is not supported; supported: {', '.join(MODEL_TYPES)}"
        )
    try:
        return _info(path, model_type, config)
    except ModelFilesError as error:
        raise ModelFilesError(f"{path}: {error}") from None
    except OSError as error:
        raise ModelFilesError(f"{error.filename or path} cannot be read: {error.strerror}") from None


def is_vision_config(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a vision-language or video model."""
    kind = str(config.get("model_type", ""))
    return "vision_config" in config or "text_config" in config or kind.endswith(("_vl", "_vl_moe", "_omni"))


def _info(path: Path, model_type: str, config: dict[str, Any]) -> ModelInfo:
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    intermediate = _size(config, "intermediate_size")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), dict | None):
            raise ModelFilesError(f"{name} in config.json should be an object, got {config[name]!r}")
    weights = weight_files(path)
    tensors = _stored_tensors(path, weights)
    info = ModelInfo(
        path=path,
        model_type=model_type,
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", default=heads),
        head_dim=_size(config, "head_dim", default=hidden // heads),
        intermediate=intermediate,
        vocab=_size(config, "vocab_size"),
        max_positions=_size(config, "max_position_embeddings"),
        experts=_size(config, "num_experts", "num_local_experts", "n_routed_experts", default=0),
        expert_intermediate=_size(config, "moe_intermediate_size", default=intermediate),
        parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        weight_files=weights,
        tensors=tensors,
    )
    return info if weights else replace(info, parameters=_parameters_by_size(info, config))


def _parameters_by_size(info: ModelInfo, config: dict[str, Any]) -> int:
    """Count the weights of a Llama-like decoder: embeddings, attention, SwiGLU MLPs and norms."""
    embeddings = info.vocab * info.hidden * (1 if config.get("tie_word_embeddings") else 2)
    attention = 2 * info.hidden * info.head_dim * (info.heads + info.kv_heads)
    mlp = 3 * info.hidden * (info.experts * info.expert_intermediate or info.intermediate)
    router = info.experts * info.hidden
    return embeddings + info.layers * (attention + mlp + router + 2 * info.hidden) + info.hidden


def _size(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of `names` that config.json gives as a positive whole number."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelFilesError(f"{name} in config.json should be a whole number, got {value!r}")
        if value > 0:
            return value
    if default is None:
        raise ModelFilesError(f"config.json lacks {names[0]!r}")
    return default


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model, checked against its index; none where there are no weights at all.

    Raises ModelFilesError for weights that are incomplete or in another form.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ModelFilesError(f"weight file {missing[0]} that the index names is missing; download it again")
        if names:
            return tuple(path / name for name in names)
    if (path / "model.safetensors").is_file():
        return (path / "model.safetensors",)
    if any(path.glob("pytorch_model*.bin")):
        raise ModelFilesError(
            "the weights are in .bin form only; save the model once more with save_pretrained() for safetensors"
        )
    return ()


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor -> file as the index says. Raises ModelFilesError for an index of another form."""
    names = read_json(index).get("weight_map", {})
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelFilesError(f"{index.name} should map tensors to files in weight_map; get it again")
    return names


def _stored_tensors(path: Path, files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Return every tensor of the model in `path` by name, from the headers of its weight `files`.

    Where there is an index, those that it names. Raises ModelFilesError for a damaged file, one that ends too early,
    and one that lacks a tensor that the index looks for there.
    """
    headers = {str(file.relative_to(path)): _read_header(file) for file in files}
    index = path / "model.safetensors.index.json"
    if not (index.is_file() and (named := _weight_map(index))):
        return {name: tensor for header in headers.values() for name, tensor in header.items()}
    for name, file in named.items():
        if name not in headers[file]:
            raise ModelFilesError(f"{file} has no tensor {name}, which the index looks for there; get both files again")
    return {name: headers[file][name] for name, file in named.items()}


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Return what the header of a safetensors file says of each tensor. Raises ModelFilesError where it is damaged."""
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ModelFilesError(f"{file.name} is not a safetensors file, or it is cut off; get it again")
        try:
            tensors = {
                name: _stored_tensor(file, value, 8 + size)
                for name, value in json.loads(stream.read(size)).items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelFilesError(f"{file.name} has a damaged header; get it again") from None
    needed = max((tensor.end for tensor in tensors.values()), default=8 + size)
    size = file.stat().st_size
    if size != needed:
        what = "is cut off" if size < needed else "goes on behind its tensors"
        raise ModelFilesError(f"{file.name} {what}: {size} of {needed} bytes; get it again")
    return tensors


def _stored_tensor(file: Path, value: dict[str, Any], data: int) -> StoredTensor:
    start, end = value["data_offsets"]
    return StoredTensor(file, str(value["dtype"]), tuple(map(int, value["shape"])), data + start, data + end)


def same_weights(one: ModelInfo, other: ModelInfo) -> bool:
    """Say whether two models hold the same weights: the same files, or the same sizes and sampled content."""
    if one.path == other.path:
        return True
    if not (one.weight_files and other.weight_files):
        return False
    sizes = [[file.stat().st_size for file in info.weight_files] for info in (one, other)]
    if sizes[0] != sizes[1]:
        return False
    pairs = zip(one.weight_files, other.weight_files, strict=True)
    return all(left.samefile(right) or _fingerprint(left) == _fingerprint(right) for left, right in pairs)


def _fingerprint(file: Path) -> str:
    """Hash pieces spread over a file: fine-tuned models often share their first tensors."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for piece in range(FINGERPRINT_PIECES):
            stream.seek(max(0, size - FINGERPRINT_BYTES) * piece // (FINGERPRINT_PIECES - 1))
            digest.update(stream.read(FINGERPRINT_BYTES))
    return digest.hexdigest()
