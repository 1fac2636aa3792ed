"""What a Hugging Face model directory says about itself: sizes, positions, weights. JSON only, no torch.

Parameter counts come from the headers of the safetensors files, which say every tensor's shape; where the
weights are not on this machine, from the sizes in config.json.
"""

import hashlib
import json
import math
import operator
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_opd.failures import os_sentence
from roll_opd.paths import PathError, content, find_path, places

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
LARGEST_SIZE = 2**31 - 1  # of a number in config.json: what engines keep shapes in
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


def find_model(text: str) -> Path:
    """Return the local directory of a model: a path, or a Hub name that has already been downloaded.

    Raises ModelFilesError if there is none; nothing is ever downloaded.
    """
    try:
        found = find_path(text) or _in_hub_cache(text)
        is_file = found is not None and not found.is_dir()
    except PathError as error:
        raise ModelFilesError(f"{error} (a model is the path of a local Hugging Face model directory)") from None
    except OSError as error:
        raise ModelFilesError(os_sentence(error)) from None
    if found is None:
        raise ModelFilesError(
            f"model {text!r} not found: no such directory from {places()}, and not in the Hugging Face cache; give the"
            " path of a local Hugging Face model directory"
        )
    if is_file:
        raise ModelFilesError(f"model {text!r} is a file; give the directory with config.json and the weights")
    return found


def _in_hub_cache(name: str) -> Path | None:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    home = Path(os.path.expanduser(os.environ.get("HF_HOME", "~/.cache/huggingface")))
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
        value = json.loads(content(path).decode("utf-8"))
    except PathError as error:
        raise ModelFilesError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ModelFilesError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); get it again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}; get it again") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} should hold a JSON object")
    return value


def read_model(path: Path) -> ModelInfo:
    """Return what is known of the model in directory `path`. Raises ModelFilesError."""
    try:
        if not (path / "config.json").is_file():
            raise ModelFilesError(f"{path} has no config.json; it is not a Hugging Face model directory")
    except OSError as error:
        raise ModelFilesError(os_sentence(error)) from None
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
        raise ModelFilesError(os_sentence(error)) from None


def is_vision_config(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a vision-language or video model."""
    kind = str(config.get("model_type", ""))
    return "vision_config" in config or "text_config" in config or kind.endswith(("_vl", "_vl_moe", "_omni"))


def _info(path: Path, model_type: str, config: dict[str, Any]) -> ModelInfo:
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    intermediate = _size(config, "intermediate_size")
    weights = weight_files(path)
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
        parameters=sum(map(_parameters, weights)),
        weight_files=weights,
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
        if value > LARGEST_SIZE:
            raise ModelFilesError(
                f"{name} in config.json is more than {LARGEST_SIZE}, which no model has; get it again"
            )
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
        names = _indexed(index)
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


def _indexed(index: Path) -> list[str]:
    """Return the names of the weight files in an index."""
    weight_map = read_json(index).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) and name for name in weight_map.values()):
        raise ModelFilesError(f"weight_map in {index.name} should give each weight the name of a file; get it again")
    return sorted(set(weight_map.values()))


def _parameters(file: Path) -> int:
    """Count the parameters in one safetensors file from its header."""
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ModelFilesError(f"{file.name} is not a safetensors file, or it is cut off; get it again")
        try:
            header = json.loads(stream.read(size))
            tensors = [value for name, value in header.items() if name != "__metadata__"]
            total = sum(math.prod(map(operator.index, tensor["shape"])) for tensor in tensors)
            if not 0 <= total < 2**63:
                raise ValueError("more weights than there can be")
            needed = 8 + size + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
            raise ModelFilesError(f"{file.name} has a damaged header; get it again") from None
    if file.stat().st_size < needed:
        raise ModelFilesError(f"{file.name} is cut off: {file.stat().st_size} of {needed} bytes; get it again")
    return total


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
