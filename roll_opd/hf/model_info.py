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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll_opd.failures import os_sentence
from roll_opd.paths import PathError, content, find_path, hub_hint, places

# model_type in config.json -> whether the Megatron engine runs it; a run of the others can be planned, not started
MODEL_TYPES = {
    "llama": True,
    "mistral": True,
    "qwen2": True,
    "qwen2_moe": True,
    "qwen3": True,
    "qwen3_moe": True,
    "qwen3_next": False,
    "mixtral": True,
    "deepseek_v2": True,
    "deepseek_v3": True,
    "glm4_moe": False,
}
DEEPSEEK_TYPES = ("deepseek_v2", "deepseek_v3")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what families call the number of experts
RUN = tuple(name for name, runs in MODEL_TYPES.items() if runs)
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
LARGEST_SIZE = 2**31 - 1  # of a number in config.json: what engines keep shapes in
FINGERPRINT_PIECES = 16
FINGERPRINT_BYTES = 65_536


class ModelFilesError(Exception):
    """A model directory cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class LatentInfo:
    """Widths of multi-head latent attention."""

    query_rank: int  # 0: queries are made from hidden states
    rank: int
    plain: int  # of a query or key, what is not rotated
    rotated: int
    value: int

    @property
    def cached(self) -> int:
        """Numbers of a token and layer that an inference engine keeps, for all heads together."""
        return self.rank + self.rotated

    @property
    def narrow(self) -> int:
        """What is made from hidden states and is the same for all heads."""
        return self.query_rank + self.rank + self.rotated


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of a decoder-only model, from config.json and the weight headers."""

    path: Path
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    intermediate: int
    vocab: int
    max_positions: int
    experts: int  # 0: dense
    expert_intermediate: int  # MLP width of one expert
    experts_per_token: int
    shared_intermediate: int  # MLP width of the experts that see every token; 0: none
    has_experts: tuple[bool, ...]  # of each layer; the others are dense
    tied: bool  # the head is the embedding
    parameters: int
    weight_files: tuple[Path, ...]  # empty: config.json only
    tensors: Mapping[str, "StoredTensor"] = field(default_factory=dict, repr=False)  # of the weight files, by name
    latent: LatentInfo | None = None  # None: keys and values are made from hidden states

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return sum(self.has_experts)

    def cached_elements(self, tp: int) -> float:
        """Return what an inference rank of `tp` keeps of a token: more ranks than key/value heads have copies."""
        if self.latent:
            return self.layers * self.latent.cached
        return 2 * self.layers * max(1.0, self.kv_heads / tp) * self.head_dim


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
    try:
        found = find_path(text) or _in_hub_cache(text)
        is_file = found is not None and not found.is_dir()
    except PathError as error:
        raise ModelFilesError(f"{error} (a model is the path of a local Hugging Face model directory)") from None
    except OSError as error:
        raise ModelFilesError(os_sentence(error)) from None
    if found is None:
        hint = hub_hint(text)
        raise ModelFilesError(
            f"model {text!r} not found: no such directory from {places()}, and not in the Hugging Face cache; give the"
            f" path of a local Hugging Face model directory{f', or {hint}' if hint else ''}"
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
            f"{path} has model_type {model_type!r}, which is not supported; supported: {', '.join(RUN)}"
            f" ({', '.join(name for name in MODEL_TYPES if name not in RUN)} can be planned, not run)"
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
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), dict | None):
            raise ModelFilesError(f"{name} in config.json should be an object, got {config[name]!r}")
    layers, intermediate = _size(config, "num_hidden_layers"), _size(config, "intermediate_size")
    experts = _size(config, *EXPERT_COUNTS, default=0)
    expert_intermediate = _size(config, "moe_intermediate_size", default=intermediate)
    shared = _size(config, "n_shared_experts", default=0) * expert_intermediate
    weights = weight_files(path)
    tensors = _stored_tensors(path, weights)
    latent = _latent(config) if model_type in DEEPSEEK_TYPES else None
    info = ModelInfo(
        path=path,
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", default=heads),
        head_dim=latent.plain + latent.rotated if latent else _size(config, "head_dim", default=hidden // heads),
        intermediate=intermediate,
        vocab=_size(config, "vocab_size"),
        max_positions=_size(config, "max_position_embeddings"),
        experts=experts,
        expert_intermediate=expert_intermediate,
        experts_per_token=_size(config, "num_experts_per_tok", default=1) if experts else 0,
        shared_intermediate=_size(config, "shared_expert_intermediate_size", default=shared) if experts else 0,
        has_experts=layers_with_experts(config, layers, experts),
        tied=bool(config.get("tie_word_embeddings")),
        parameters=sum(math.prod(tensor.shape) for name, tensor in tensors.items() if not _is_behind(name, layers)),
        weight_files=weights,
        tensors=tensors,
        latent=latent,
    )
    return info if weights else replace(info, parameters=_parameters_by_size(info))


def _latent(config: dict[str, Any]) -> LatentInfo:
    return LatentInfo(
        query_rank=_size(config, "q_lora_rank", default=0),
        rank=_size(config, "kv_lora_rank"),
        plain=_size(config, "qk_nope_head_dim"),
        rotated=_size(config, "qk_rope_head_dim"),
        value=_size(config, "v_head_dim"),
    )


def _is_behind(name: str, layers: int) -> bool:
    """Whether a tensor is of a layer behind the last, which predicts further tokens and is not loaded."""
    parts = name.split(".")
    return name.startswith("model.layers.") and parts[2].isdigit() and int(parts[2]) >= layers


def layers_with_experts(config: Mapping[str, Any], layers: int, experts: int) -> tuple[bool, ...]:
    """Return which layers of a config.json have experts; the others are dense."""
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    first = config.get("first_k_dense_replace") or 0
    return tuple(
        bool(experts) and number not in dense and (number + 1) % step == 0 and number >= first
        for number in range(layers)
    )


def _parameters_by_size(info: ModelInfo) -> int:
    """Count the weights of a Llama-like decoder: embeddings, attention, SwiGLU MLPs and norms."""
    embeddings = info.vocab * info.hidden * (1 if info.tied else 2)
    attention = 2 * info.hidden * info.head_dim * (info.heads + info.kv_heads)
    if latent := info.latent:
        queries, values = info.heads * info.head_dim, info.heads * latent.value
        attention = info.hidden * (latent.narrow + values) + latent.rank * (info.heads * latent.plain + values)
        attention += (latent.query_rank or info.hidden) * queries
    experts = info.experts * (3 * info.expert_intermediate + 1) + 3 * info.shared_intermediate  # and the router
    mlps = info.expert_layers * experts + (info.layers - info.expert_layers) * 3 * info.intermediate
    return embeddings + info.layers * (attention + 2 * info.hidden) + mlps * info.hidden + info.hidden


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
    if not isinstance(names, dict) or not all(isinstance(name, str) and name for name in names.values()):
        raise ModelFilesError(f"weight_map in {index.name} should give each weight the name of a file; get it again")
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
            if not 0 <= sum(math.prod(tensor.shape) for tensor in tensors.values()) < 2**63:
                raise ValueError("more weights than there can be")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
            raise ModelFilesError(f"{file.name} has a damaged header; get it again") from None
    needed = max((tensor.end for tensor in tensors.values()), default=8 + size)
    size = file.stat().st_size
    if size != needed:
        what = "is cut off" if size < needed else "goes on behind its tensors"
        raise ModelFilesError(f"{file.name} {what}: {size} of {needed} bytes; get it again")
    return tensors


def _stored_tensor(file: Path, value: dict[str, Any], data: int) -> StoredTensor:
    start, end = value["data_offsets"]
    return StoredTensor(file, str(value["dtype"]), tuple(map(operator.index, value["shape"])), data + start, data + end)


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
