"""Names of Megatron's parameters in a layer, the Hugging Face tensors of each, and its slices over tensor ranks.

`layer_entries` of `family_definition` adds the parameters that only some decoders of a family have.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# how a parameter is sliced over tensor ranks; see `megatron.weights.tensor_slices`
Slicing = Literal[
    "replicated",
    "rows",
    "columns",
    "vocabulary",
    "qkv",
    "gate_up",
    "fused_qkv",
    "fused_gate_up",
    "gated_qkv",
    "interleaved_gate_up",
    "transposed_columns",
    "delta_key_heads",
    "delta_parts",
    "delta_channels",
]


@dataclass(frozen=True)
class Entry:
    """The Hugging Face tensors that make up one parameter, and how they are sliced over tensor ranks.

    Their names contain the placeholders `{layer}` and `{expert}`.
    """

    names: tuple[str, ...]
    slicing: Slicing

    def of(self, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
        """Return the tensor names for one layer, and for one expert if the names contain `{expert}`."""
        return tuple(name.format(layer=layer, expert=expert) for name in self.names)

    def under(self, prefix: str) -> "Entry":
        """Return a copy of the entry in which `prefix` replaces "model." at the start of the tensor names."""
        return Entry(tuple(re.sub(r"^model\.", prefix, name) for name in self.names), self.slicing)

    @property
    def is_expert(self) -> bool:
        """Whether each expert has its own copy of the parameter."""
        return "{expert}" in self.names[0]


Entries = Mapping[str, Entry]  # name of Megatron's parameter in a layer -> entry


def layer(slicing: Slicing, *names: str) -> Entry:
    """Return the entry of a parameter in a layer.

    `names`: names of its Hugging Face tensors in the layer.
    """
    return Entry(tuple(f"model.layers.{{layer}}.{name}" for name in names), slicing)


EACH_EXPERT = "mlp.experts.local_experts.*"
ATTENTION_OUTPUT_NORM, MLP_OUTPUT_NORM = "self_attn_bda.norm.weight", "mlp_bda.norm.weight"
# names in a layer; the norm before a linear layer has a different name in Transformer Engine's fused layers
LLAMA: dict[str, Entry] = {
    "input_layernorm.weight": layer("replicated", "input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": layer("replicated", "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": layer("qkv", *(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_proj.weight": layer("columns", "self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": layer("replicated", "post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": layer("replicated", "post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": layer("gate_up", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": layer("columns", "mlp.down_proj.weight"),
}
FUSED_QKV = {"self_attention.linear_qkv.weight": layer("fused_qkv", "self_attn.qkv_proj.weight")}
FUSED_GATE_UP = {"mlp.linear_fc1.weight": layer("fused_gate_up", "mlp.gate_up_proj.weight")}
QKV_BIAS = {"self_attention.linear_qkv.bias": layer("qkv", *(f"self_attn.{x}_proj.bias" for x in "qkv"))}
OUT_BIAS = {"self_attention.linear_proj.bias": layer("replicated", "self_attn.o_proj.bias")}


def experts(block: str, gate: str, up: str, down: str) -> dict[str, Entry]:
    """Return the entries of the router and the experts.

    Args:
        block: name of the module that contains the experts.
        gate, up, down: names of the modules of one expert.
    """
    each = f"{block}.experts.{{expert}}"
    return {
        "mlp.router.weight": layer("replicated", f"{block}.gate.weight"),
        f"{EACH_EXPERT}.linear_fc1.weight": layer("gate_up", f"{each}.{gate}.weight", f"{each}.{up}.weight"),
        f"{EACH_EXPERT}.linear_fc2.weight": layer("columns", f"{each}.{down}.weight"),
    }


def shared_experts(block: str) -> dict[str, Entry]:
    """Return the entries of the shared experts, which process every token.

    `block`: name of the module that contains their tensors.
    """
    return {
        "mlp.shared_experts.linear_fc1.weight": layer(
            "gate_up", f"{block}.gate_proj.weight", f"{block}.up_proj.weight"
        ),
        "mlp.shared_experts.linear_fc2.weight": layer("columns", f"{block}.down_proj.weight"),
    }


EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")
EXPERT_BIAS = {"mlp.router.expert_bias": layer("replicated", "mlp.gate.e_score_correction_bias")}


def norms(before_attention: str, before_mlp: str, after_attention: str, after_mlp: str) -> dict[str, Entry]:
    """Return the entries of a layer's norms.

    The arguments are the names of their modules, or "" for a norm that the layer does not have.
    """
    places = {
        "input_layernorm.weight": before_attention,
        "pre_mlp_layernorm.weight": before_mlp,
        ATTENTION_OUTPUT_NORM: after_attention,
        MLP_OUTPUT_NORM: after_mlp,
    }
    return {place: layer("replicated", f"{name}.weight") for place, name in places.items() if name}


def without_norms(entries: Entries) -> dict[str, Entry]:
    """Return `entries` without the entries of a layer's norms."""
    return {place: entry for place, entry in entries.items() if not place.endswith(("layernorm.weight", "norm_weight"))}
