"""Which Megatron parameter holds which of Hugging Face's tensors, and a family's configuration in Megatron's words.

A new family of decoders is one entry of `FAMILIES`: what it adds to a Llama, and where its tensors go.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional
from transformers import PretrainedConfig

from roll_opd.config.plan import Layout
from roll_opd.hf.weight_files import EMBEDDING, FINAL_NORM, HEAD, VALUE_HEAD
from roll_opd.megatron.weights.cuts import Cut, Gated, Heads, Same, Split, Vocabulary


@dataclass(frozen=True)
class Entry:
    """Of one parameter: Hugging Face's tensors in it, and how they are cut. `{layer}` stands for a layer's number."""

    names: tuple[str, ...]
    cut: Cut

    def of(self, layer: int | None) -> tuple[str, ...]:
        """Return the names in a layer."""
        return tuple(name.format(layer=layer) for name in self.names)


def _layer(cut: Cut, *names: str) -> Entry:
    return Entry(tuple(f"model.layers.{{layer}}.{name}" for name in names), cut)


ENDS = {
    "embedding.word_embeddings.weight": Entry((EMBEDDING,), Vocabulary()),
    "output_layer.weight": Entry((HEAD,), Vocabulary()),
    "decoder.final_layernorm.weight": Entry((FINAL_NORM,), Same()),
    "value_head.weight": Entry((VALUE_HEAD,), Same()),  # a critic's, as in models for sequence classification
}
# of a layer; the norm before a linear layer has one name in the local spec, another in Transformer Engine's fused one
LLAMA = {
    "input_layernorm.weight": _layer(Same(), "input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": _layer(Same(), "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": _layer(Heads(), *(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_proj.weight": _layer(Split(1), "self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": _layer(Same(), "post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": _layer(Same(), "post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": _layer(Gated(), "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": _layer(Split(1), "mlp.down_proj.weight"),
}
QKV_BIAS = {"self_attention.linear_qkv.bias": _layer(Heads(), *(f"self_attn.{x}_proj.bias" for x in "qkv"))}
QK_NORM = {f"self_attention.{x}_layernorm.weight": _layer(Same(), f"self_attn.{x}_norm.weight") for x in "qk"}


@dataclass(frozen=True)
class Family:
    """Decoders of one `model_type`: entries by the parameter's name within a layer, and settings of Megatron's."""

    layer: Mapping[str, Entry] = field(default_factory=lambda: LLAMA)
    settings: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(LLAMA | QKV_BIAS, {"add_qkv_bias": True}),
    "qwen3": Family(LLAMA | QK_NORM, {"qk_layernorm": True}),
}


def transformer_config(
    hf_config: PretrainedConfig, dtype: torch.dtype, layout: Layout, overrides: Mapping[str, Any]
) -> TransformerConfig:
    """Return Megatron's configuration of a model; `overrides` are further settings, which win."""
    settings = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": hf_config.__dict__.get("head_dim"),
        "ffn_hidden_size": hf_config.intermediate_size,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "normalization": "RMSNorm",
        "activation_func": functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "variable_seq_lengths": True,  # packs differ in length
        "moe_token_dispatcher_type": "alltoall",  # asked of dense models, too: the default wants packs of one length
        "batch_p2p_comm": False,
        "overlap_p2p_comm": layout.vpp is not None and layout.pp > 1,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "attention_backend": attention_left_on(),
        **FAMILIES[hf_config.model_type].settings,
        **overrides,
    }
    if isinstance(settings.get("attention_backend"), str):
        settings["attention_backend"] = AttnBackend[settings["attention_backend"]]
    return TransformerConfig(**settings)


def attention_left_on() -> AttnBackend:
    """Return the kind of attention that Transformer Engine's switches in the environment leave on, `auto` without them.

    Megatron stops where it is not told of them, as in configurations of ROLL's that set them in `system_envs`.
    """
    kinds = ("flash", "fused", "unfused")
    on = [kind for kind in kinds if os.environ.get(f"NVTE_{kind.upper()}_ATTN", "1") != "0"]
    if len(on) == len(kinds):
        return AttnBackend.auto
    for kind in on[1:]:  # of two that are left, the faster one; Megatron knows no choice of two
        os.environ[f"NVTE_{kind.upper()}_ATTN"] = "0"
    return AttnBackend[on[0]] if on else AttnBackend.local
