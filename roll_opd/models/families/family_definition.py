"""`Family`: tensors, computations and config.json keys of the decoders with one `model_type`. Does not import torch.

A family lists the differences between its decoders and Llama, in the names of tensors and in the layers (`Pieces`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from roll_opd.models.families.parameter_names import LLAMA, OUT_BIAS, QKV_BIAS, Entries, Entry, layer

Config = Mapping[str, Any]  # content of config.json
DELTA = "delta"  # value in `Pieces.mixers` for Gated DeltaNet
WINDOWED = "sliding_attention"  # value in `layer_types` of config.json
LONGROPE = ("longrope", "su")  # rope types; the second is the old name


@dataclass(frozen=True)
class Pieces:
    """The differences between a model's layers and Llama's layers.

    A tuple has one value per layer. An empty tuple means that all layers have the default.
    """

    qkv_bias: bool = False
    out_bias: bool = False  # attention's output projection has a bias
    query_key_norm: Literal["", "head", "heads"] = ""  # norm over each head, or over all heads together
    norms: Literal["before", "after", "both"] = "before"  # position of the norms relative to attention and MLP
    zero_centred_norms: bool = False  # norms multiply by 1 + weight
    windows: tuple[int, ...] = ()  # number of keys that a query sees, including its own; 0: all
    rotary: tuple[str, ...] = ()  # key of rope_parameters, or "default" without keys; "": no rotation
    rotated: float = 1.0  # fraction of a head's width
    interleaved: bool = False  # the two elements of a rotated pair are adjacent
    attention_scale: float | None = None  # None: 1 / √(head width)
    activation: Literal["silu", "gelu_tanh"] = "silu"  # activation of the MLP's gate
    embedding_scale: float = 1.0
    mixers: tuple[str, ...] = ()  # DELTA: Gated DeltaNet replaces attention; "": attention
    output_gate: bool = False  # the output of attention is multiplied by the sigmoid of a gate
    sinks: bool = False  # a learned score per query head in the softmax's denominator
    score_cap: float | None = None  # attention scores are cap · tanh(score / cap)
    logit_cap: float | None = None  # logits are cap · tanh(logit / cap)
    expert_bias: bool = False  # routers and experts have biases
    clipped_swiglu: tuple[float, float] | None = None  # limit and alpha: min(gate, limit) · σ(alpha · gate) · (up + 1)

    @property
    def is_plain(self) -> bool:
        """Whether fused layers can compute the layers that these pieces describe.

        This is the case if the layers equal Llama's, except possibly for biases of queries, keys and values, and for
        norms per head.
        """
        return self == Pieces(qkv_bias=self.qkv_bias, query_key_norm="head" if self.query_key_norm else "")


def windows(config: Config, *, period: int = 0) -> tuple[int, ...]:
    """Return the window of each layer, from `sliding_window` and `layer_types`; () if no layer has a window.

    If config.json has no `layer_types`, `period` decides which layers have a window (see `layer_kinds`).
    """
    size, layers = config.get("sliding_window") or 0, config["num_hidden_layers"]
    kinds = config.get("layer_types") or layer_kinds(layers, period)
    found = tuple(size if kind == WINDOWED else 0 for kind in kinds)
    return found if any(found) else ()


def layer_kinds(layers: int, period: int) -> list[str]:
    """Return the type of each layer: with a window, or without.

    Every layer whose number is a multiple of `period` has no window (layers counted from 1), and all others have one.
    With period 0, no layer has a window.
    """
    return [WINDOWED if period and (number + 1) % period else "full_attention" for number in range(layers)]


def rotated_share(config: Config, default: float = 1.0) -> float:
    """Return the fraction of a head's width that is rotated."""
    rope = config.get("rope_parameters") or {}
    return float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or default)


def positions(config: Config) -> tuple[int, str]:
    """Return (number of positions that the engine supports, key of config.json that contains this number).

    longrope has one set of factors up to the original length, and a second set for longer sequences. The engine uses
    only the first set.
    """
    rope, name = config.get("rope_parameters") or config.get("rope_scaling") or {}, "original_max_position_embeddings"
    is_long = isinstance(rope, Mapping) and (rope.get("rope_type") or rope.get("type")) in LONGROPE
    original = config.get(name) or (rope.get(name) if is_long else None)
    if not is_long or not isinstance(original, int):
        name = "max_position_embeddings"
        original = config.get(name) or 0
    return original, name


@dataclass(frozen=True)
class Family:
    """The decoders of one `model_type`."""

    model_type: str
    tensors: Entries = field(default_factory=lambda: LLAMA)  # without the biases and norms that `Pieces` adds
    pieces: Callable[[Config], Pieces] = lambda config: Pieces()
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings for Megatron's TransformerConfig
    # how experts are scored; "groups": as in DeepSeek-V2, "biased_groups": as in DeepSeek-V3, with a bias per expert,
    # "biased": as in DeepSeek-V3 without groups
    router: Literal["softmax", "groups", "biased_groups", "biased"] = "softmax"
    expects: Mapping[str, object] = field(default_factory=dict)  # key of config.json -> the only validated value
    reads: tuple[str, ...] = ()  # keys of config.json that `pieces` implements
    layer_types: tuple[str, ...] = ()  # layer types in config.json other than attention with and without windows
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    is_tied: bool = False  # the head is the embedding unless config.json has tie_word_embeddings
    has_adapters: bool = True  # LoRA is validated
    # a checkpoint stacks the tensors of a layer's experts; the stack has an expert tensor's name without its number
    stacks_experts: bool = False
    reads_mxfp4: bool = False  # quantised experts are read in bf16
    problems: Callable[[Config], tuple[str, ...]] = lambda config: ()  # other problems of a config.json


def layer_entries(tensors: Entries, pieces: Pieces) -> dict[str, Entry]:
    """Return the entries of a model's layers. Biases, query norms and key norms are included."""
    return (
        dict(tensors)
        | (QKV_BIAS if pieces.qkv_bias else {})
        | (OUT_BIAS if pieces.out_bias else {})
        | {
            f"self_attention.{x}_layernorm.weight": layer("replicated", f"self_attn.{x}_norm.weight")
            for x in ("qk" if pieces.query_key_norm else "")
        }
    )
