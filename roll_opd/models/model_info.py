"""`ModelInfo`: sizes, maximum positions and weights of a Hugging Face model directory, read without torch.

The number of parameters is read from the headers of the safetensors files. If the directory has no weights, the number
is computed from the sizes in config.json.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll_opd.base import hub
from roll_opd.base.failures import os_sentence
from roll_opd.base.paths import PathError, find_path, places
from roll_opd.models.families import FAMILIES
from roll_opd.models.families.family_definition import positions
from roll_opd.models.families.qwen_hybrid import DELTA_KEYS, DeltaSizes, delta_layers
from roll_opd.models.hub_models import has_weights, local_model, whole
from roll_opd.models.model_files import MULTIMODAL, decoder_config, is_kept, stored_tensors, weight_files
from roll_opd.models.model_files import ModelFilesError as ModelFilesError
from roll_opd.models.model_files import StoredTensor as StoredTensor
from roll_opd.models.model_files import read_json as read_json

DEEPSEEK_TYPES = ("deepseek_v2", "deepseek_v3")
EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)  # key of the number of experts, by model family
RUN = tuple(FAMILIES)
MAX_SIZE = 2**31 - 1  # largest number in config.json; engines store shapes as int32
FINGERPRINT_PIECES = 16
FINGERPRINT_BYTES = 65_536


@dataclass(frozen=True)
class LatentInfo:
    """Widths of multi-head latent attention."""

    query_rank: int  # 0: queries are projected from hidden states
    rank: int
    plain: int  # unrotated width of a query or key
    rotated: int
    value: int

    @property
    def cached(self) -> int:
        """Number of cached elements per token and layer; all heads share these elements."""
        return self.rank + self.rotated

    @property
    def narrow(self) -> int:
        """Total width of the projections from hidden states. All heads share these projections."""
        return self.query_rank + self.rank + self.rotated


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of a decoder-only model, read from config.json and from the headers of its weights."""

    path: Path
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # width of the queries and keys of a head
    intermediate: int
    vocab: int
    max_positions: int
    experts: int  # 0: dense
    expert_intermediate: int  # MLP width of one expert
    experts_per_token: int
    shared_intermediate: int  # MLP width of the experts that see every token; 0: none
    has_experts: tuple[bool, ...]  # for each layer; False: a dense layer
    tied: bool  # the head is the embedding
    parameters: int
    weight_files: tuple[Path, ...]  # empty: config.json only
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict, repr=False)  # name -> header entry
    latent: LatentInfo | None = None  # None: no latent attention
    delta: DeltaSizes | None = None  # None: no Gated DeltaNet layers
    is_delta: tuple[bool, ...] = ()  # for each layer; False: a layer with attention
    has_output_gate: bool = False  # attention has an output gate
    windows: tuple[int, ...] = ()  # per layer, keys that a query sees (0: all before it); empty: no windows
    logit_cap: float | None = None  # cap of the output logits; None: no cap
    norms: int = 2  # norms per layer, without the norms of queries and keys
    has_expert_bias: bool = False
    has_f32_norms: bool = False  # norms copy their input to f32
    positions_key: str = "max_position_embeddings"  # key of config.json with `max_positions`

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the tensors that are exported unchanged, because they are neither loaded nor trained."""
        return tuple(name for name in self.tensors if is_kept(name, self.layers))

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(self.has_experts)

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.layers - sum(self.is_delta)

    def state_elements(self, tp: int) -> float:
        """Return the number of elements that an inference rank stores per sequence for the Gated DeltaNet layers.

        `tp` is the number of tensor-parallel ranks of an engine.
        """
        return sum(self.is_delta) * self.delta.state / tp if self.delta else 0

    def cached_elements(self, tp: int) -> float:
        """Return the number of cached elements per token on an inference rank.

        `tp` is the number of tensor-parallel ranks of an engine. If there are more ranks than key/value heads, several
        ranks have a copy of the same head.
        """
        if self.latent:
            return self.layers * self.latent.cached
        return 2 * self.attention_layers * max(1.0, self.kv_heads / tp) * self.head_dim


def find_model(text: str) -> Path:
    """Return the local directory of a model.

    `text` is a path, or a name on a hub, see `roll_opd.base.hub`. Raises ModelFilesError if there is no such directory.
    """
    try:
        found = find_path(text)
        is_file = found is not None and not found.is_dir()
        name = hub.hub_name(text, "model") if found is None else None
        if name:
            return local_model(name)
    except hub.HubError as error:
        raise ModelFilesError(str(error)) from None
    except PathError as error:
        raise ModelFilesError(f"{error} (a model should be the path of a local model directory)") from None
    except OSError as error:
        raise ModelFilesError(os_sentence(error)) from None
    if found is None:
        raise ModelFilesError(
            f"model {text!r} not found: no such directory from {places()}; set the path of a Hugging Face model"
            " directory, or a name on the hub (owner/name)"
        )
    if is_file:
        raise ModelFilesError(f"model {text!r} is a file; set the directory with config.json and the weights")
    return found


def whole_model(text: str, say: Callable[[str], None]) -> Path:
    """Return the local directory of a model with its weights, as `find_model`. A name on a hub is downloaded.

    `say` gets the lines about the download. Raises ModelFilesError.
    """
    with hub.downloading(say):
        path, name = find_model(text), hub.hub_name(text, "model")
        try:
            return hub.fetch(name, whole) if name and hub.name_of(path) and not has_weights(path) else path
        except hub.HubError as error:
            raise ModelFilesError(str(error)) from None


def read_model(path: Path) -> ModelInfo:
    """Return the sizes and weight files of the model in directory `path`.

    Raises ModelFilesError if the directory cannot be read or the model is not supported.
    """
    try:
        if not (path / "config.json").is_file():
            raise ModelFilesError(f"{path} has no config.json; {_in_its_place(path)}")
    except OSError as error:
        raise ModelFilesError(os_sentence(error)) from None
    config = decoder_config(read_json(path / "config.json"))
    model_type = str(config.get("model_type", ""))
    if is_vision_config(config):
        raise ModelFilesError(
            f"{path} is a vision-language model ({model_type}); only text models can be distilled here"
        )
    if model_type not in FAMILIES:
        raise ModelFilesError(
            f"{path} has model_type {model_type!r}, which is not supported; supported: {', '.join(RUN)}"
        )
    try:
        return _info(path, model_type, config)
    except ModelFilesError as error:
        raise ModelFilesError(f"{path}: {error}") from None
    except OSError as error:
        raise ModelFilesError(os_sentence(error)) from None


def _in_its_place(path: Path) -> str:
    """Describe the content of a directory without config.json, as the end of an error message."""
    if not (path / "adapter_config.json").is_file():
        return "it is not a Hugging Face model directory"
    base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
    return (
        f"it is an adapter of {base}; merge it into the model (peft's merge_and_unload), save the merged model and the"
        " tokenizer (save_pretrained), and use the saved directory"
    )


def is_vision_config(config: dict[str, Any]) -> bool:
    """Return whether a config.json belongs to a vision-language or video model whose text model is not supported."""
    kind = str(config.get("model_type", ""))
    if kind in MULTIMODAL:
        return False  # its text model can be trained
    return "vision_config" in config or "text_config" in config or kind.endswith(("_vl", "_vl_moe", "_omni"))


def _info(path: Path, model_type: str, config: dict[str, Any]) -> ModelInfo:
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), dict | None):
            raise ModelFilesError(f"{name} in config.json should be an object, got {config[name]!r}")
    layers, intermediate = (
        _size(config, "num_hidden_layers"),
        _size(config, "intermediate_size", "moe_intermediate_size"),
    )
    experts = _size(config, *EXPERT_COUNTS, default=0)
    expert_intermediate = _size(config, "moe_intermediate_size", default=intermediate)
    shared = _size(config, "n_shared_experts", default=0) * expert_intermediate
    weights = weight_files(path)
    tensors = stored_tensors(path, weights)
    latent = _latent(config) if model_type in DEEPSEEK_TYPES else None
    longest, positions_key = positions(config)
    pieces = FAMILIES[model_type].pieces(config)
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
        max_positions=_size({positions_key: longest}, positions_key),
        positions_key=positions_key,
        experts=experts,
        expert_intermediate=expert_intermediate,
        experts_per_token=_size(config, "num_experts_per_tok", default=1) if experts else 0,
        shared_intermediate=_size(config, "shared_expert_intermediate_size", default=shared) if experts else 0,
        has_experts=layers_with_experts(config, layers, experts),
        tied=bool(config.get("tie_word_embeddings", FAMILIES[model_type].is_tied)),
        parameters=sum(_weights_in(name, tensor) for name, tensor in tensors.items() if not is_kept(name, layers)),
        weight_files=weights,
        tensors=tensors,
        latent=latent,
        delta=_delta(config),
        is_delta=delta_layers(config, layers),
        has_output_gate=_delta(config) is not None,
        windows=pieces.windows,
        logit_cap=pieces.logit_cap,
        norms=4 if pieces.norms == "both" else 2,
        has_expert_bias=pieces.expert_bias,
        has_f32_norms=pieces.zero_centred_norms,
    )
    return info if weights else replace(info, parameters=_parameters_by_size(info))


def _weights_in(name: str, tensor: StoredTensor) -> int:
    """Return the number of weights in a tensor.

    A byte of an MXFP4 tensor contains two weights. A tensor of MXFP4 scales contains no weights.
    """
    if tensor.dtype != "U8":
        return math.prod(tensor.shape)
    return 2 * math.prod(tensor.shape) if name.endswith("_blocks") else 0


def _delta(config: dict[str, Any]) -> DeltaSizes | None:
    if config.get(DELTA_KEYS[0]) is None:
        return None
    return DeltaSizes(*(_size(config, key) for key in DELTA_KEYS))


def _latent(config: dict[str, Any]) -> LatentInfo:
    return LatentInfo(
        query_rank=_size(config, "q_lora_rank", default=0),
        rank=_size(config, "kv_lora_rank"),
        plain=_size(config, "qk_nope_head_dim"),
        rotated=_size(config, "qk_rope_head_dim"),
        value=_size(config, "v_head_dim"),
    )


def layers_with_experts(config: Mapping[str, Any], layers: int, experts: int) -> tuple[bool, ...]:
    """Return, for each layer of a config.json, whether it has experts; all other layers are dense."""
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    first = config.get("first_k_dense_replace") or 0
    return tuple(
        bool(experts) and number not in dense and (number + 1) % step == 0 and number >= first
        for number in range(layers)
    )


def _parameters_by_size(info: ModelInfo) -> int:
    """Return the number of weights of a Llama-like decoder: embeddings, attention, SwiGLU MLPs and norms."""
    embeddings = info.vocab * (1 if info.tied else 2)
    return (embeddings + info.norms * info.layers + 1) * info.hidden + matrix_parameters(info, info.experts)


def matrix_parameters(info: ModelInfo, experts: int, *, has_gate: bool = False) -> int:
    """Return the number of weights in the matrices of all layers, without norms.

    Args:
        experts: how many routed experts of a layer count.
        has_gate: whether shared experts have a gate.
    """
    gates = info.heads if info.has_output_gate else 0
    attention = info.hidden * info.head_dim * (2 * (info.heads + info.kv_heads) + gates)
    if latent := info.latent:
        queries, values = info.heads * info.head_dim, info.heads * latent.value
        attention = info.hidden * (latent.narrow + values) + latent.rank * (info.heads * latent.plain + values)
        attention += (latent.query_rank or info.hidden) * queries
    mixers = info.attention_layers * attention
    if delta := info.delta:  # projections, and the taps of the convolution's channels
        each = info.hidden * (delta.projected + delta.values) + sum(delta.channels) * delta.taps
        mixers += sum(info.is_delta) * each
    routed = experts * 3 * info.expert_intermediate + info.experts  # and the router
    mlps = info.expert_layers * (routed + 3 * info.shared_intermediate + has_gate)
    return mixers + info.hidden * (mlps + (info.layers - info.expert_layers) * 3 * info.intermediate)


def _size(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first positive value in config.json among the keys `names`, else `default`.

    Raises ModelFilesError if a value is not an integer, or if no key has a value and there is no default.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelFilesError(f"{name} in config.json should be an integer, got {value!r}")
        if value > MAX_SIZE:
            raise ModelFilesError(f"{name} in config.json exceeds {MAX_SIZE}; download it again")
        if value > 0:
            return value
    if default is None:
        raise ModelFilesError(f"config.json lacks {names[0]!r}")
    return default


def same_weights(one: ModelInfo, other: ModelInfo) -> bool:
    """Return whether two models have the same weights.

    Weights count as the same if both models use the same files, or if the files have equal sizes and equal
    fingerprints.
    """
    if one.path == other.path:
        return True
    if not (one.weight_files and other.weight_files):
        return False
    sizes = [[file.stat().st_size for file in info.weight_files] for info in (one, other)]
    if sizes[0] != sizes[1]:
        return False
    pairs = zip(one.weight_files, other.weight_files, strict=True)
    return all(left.samefile(right) or fingerprint(left) == fingerprint(right) for left, right in pairs)


def fingerprint(file: Path) -> str:
    """Return a hash of a file's size and of pieces of its content.

    The pieces are spread over the whole file, because the first tensors of two fine-tuned models may be equal.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for piece in range(FINGERPRINT_PIECES):
            stream.seek(max(0, size - FINGERPRINT_BYTES) * piece // (FINGERPRINT_PIECES - 1))
            digest.update(stream.read(FINGERPRINT_BYTES))
    return digest.hexdigest()
