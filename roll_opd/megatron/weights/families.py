"""Model families: mapping of Megatron parameters to Hugging Face tensors, and Megatron's configuration.

To add a family of decoders, add an entry to `FAMILIES` with its differences from Llama.
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
from roll_opd.megatron.weights.tensor_slices import QKV, GateUp, Replicated, Split, TensorSlice, VocabRows
from roll_opd.models.model_info import DEEPSEEK_TYPES, EXPERT_COUNTS, layers_with_experts
from roll_opd.models.weight_files import EMBEDDING, FINAL_NORM, HEAD, VALUE_HEAD


@dataclass(frozen=True)
class Entry:
    """Hugging Face tensors in one parameter, and their slicing over tensor ranks.

    Names contain `{layer}` and `{expert}`.
    """

    names: tuple[str, ...]
    slicing: TensorSlice

    def of(self, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
        """Return the tensor names for a layer and expert."""
        return tuple(name.format(layer=layer, expert=expert) for name in self.names)

    @property
    def is_expert(self) -> bool:
        """Whether each expert has this parameter."""
        return "{expert}" in self.names[0]


def _layer(slicing: TensorSlice, *names: str) -> Entry:
    return Entry(tuple(f"model.layers.{{layer}}.{name}" for name in names), slicing)


ENDS = {
    "embedding.word_embeddings.weight": Entry((EMBEDDING,), VocabRows()),
    "output_layer.weight": Entry((HEAD,), VocabRows()),
    "decoder.final_layernorm.weight": Entry((FINAL_NORM,), Replicated()),
    "value_head.weight": Entry((VALUE_HEAD,), Replicated()),  # of critics, as in models for sequence classification
}
EACH_EXPERT = "mlp.experts.local_experts.*"
# names in a layer; the norm before a linear layer has another name in Transformer Engine's fused layers
LLAMA = {
    "input_layernorm.weight": _layer(Replicated(), "input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": _layer(Replicated(), "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": _layer(QKV(), *(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_proj.weight": _layer(Split(1), "self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": _layer(Replicated(), "post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": _layer(Replicated(), "post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": _layer(GateUp(), "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": _layer(Split(1), "mlp.down_proj.weight"),
}
QKV_BIAS = {"self_attention.linear_qkv.bias": _layer(QKV(), *(f"self_attn.{x}_proj.bias" for x in "qkv"))}
QK_NORM = {f"self_attention.{x}_layernorm.weight": _layer(Replicated(), f"self_attn.{x}_norm.weight") for x in "qk"}


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, Entry]:
    """Return the entries of experts and router with these tensor names in `block`."""
    each = f"{block}.experts.{{expert}}"
    return {
        "mlp.router.weight": _layer(Replicated(), f"{block}.gate.weight"),
        f"{EACH_EXPERT}.linear_fc1.weight": _layer(GateUp(), f"{each}.{gate}.weight", f"{each}.{up}.weight"),
        f"{EACH_EXPERT}.linear_fc2.weight": _layer(Split(1), f"{each}.{down}.weight"),
    }


QWEN_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
SHARED_EXPERT = {
    "mlp.shared_experts.linear_fc1.weight": _layer(
        GateUp(), "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": _layer(Split(1), "mlp.shared_expert.down_proj.weight"),
    "mlp.shared_experts.gate_weight": _layer(Replicated(), "mlp.shared_expert_gate.weight"),
}
SHARED_EXPERTS = {
    "mlp.shared_experts.linear_fc1.weight": _layer(
        GateUp(), "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": _layer(Split(1), "mlp.shared_experts.down_proj.weight"),
}
EXPERT_BIAS = {"mlp.router.expert_bias": _layer(Replicated(), "mlp.gate.e_score_correction_bias")}
LATENT = {name: entry for name, entry in LLAMA.items() if "linear_qkv" not in name} | {
    "self_attention.linear_q_proj.weight": _layer(Split(0), "self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": _layer(Replicated(), "self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": _layer(Replicated(), "self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": _layer(Split(0), "self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": _layer(Replicated(), "self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": _layer(Replicated(), "self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": _layer(Split(0), "self_attn.kv_b_proj.weight"),
}
DEEPSEEK = LATENT | QWEN_EXPERTS | SHARED_EXPERTS


@dataclass(frozen=True)
class Family:
    """Decoders of one `model_type`: entries by parameter name in a layer, and Megatron settings."""

    layer: Mapping[str, Entry] = field(default_factory=lambda: LLAMA)
    settings: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "deepseek_v2": Family(DEEPSEEK, {"moe_router_dtype": "fp32"}),
    "deepseek_v3": Family(DEEPSEEK | EXPERT_BIAS, {"moe_router_dtype": "fp32"}),
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(LLAMA | QKV_BIAS, {"add_qkv_bias": True}),
    "qwen2_moe": Family(
        LLAMA | QKV_BIAS | QWEN_EXPERTS | SHARED_EXPERT, {"add_qkv_bias": True, "moe_shared_expert_gate": True}
    ),
    "qwen3": Family(LLAMA | QK_NORM, {"qk_layernorm": True}),
    "qwen3_moe": Family(LLAMA | QK_NORM | QWEN_EXPERTS, {"qk_layernorm": True}),
    "mixtral": Family(LLAMA | _experts("block_sparse_moe", "w1", "w3", "w2")),
}


def transformer_config(
    hf_config: PretrainedConfig, dtype: torch.dtype, layout: Layout, overrides: Mapping[str, Any]
) -> TransformerConfig:
    """Return Megatron's configuration of a model; `overrides` take precedence."""
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
        "moe_token_dispatcher_type": "alltoall",  # also for dense models: the default needs packs of equal length
        "batch_p2p_comm": False,
        "overlap_p2p_comm": layout.vpp is not None and layout.pp > 1,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "attention_backend": enabled_attention_backend(),
        **_expert_settings(hf_config.to_dict()),
        **FAMILIES[hf_config.model_type].settings,
        **overrides,
    }
    if isinstance(settings.get("attention_backend"), str):
        settings["attention_backend"] = AttnBackend[settings["attention_backend"]]
    return TransformerConfig(**settings)


def has_experts(hf_config: PretrainedConfig) -> bool:
    """Whether a model is a mixture of experts, which needs sequence parallelism with several tensor ranks."""
    return bool(_expert_settings(hf_config.to_dict()))


def _expert_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's settings of experts from a config.json; empty for dense models."""
    experts = next((config[name] for name in EXPERT_COUNTS if config.get(name)), 0)
    has_experts = layers_with_experts(config, config["num_hidden_layers"], experts)
    if not any(has_experts):
        return {}
    settings = {
        "num_moe_experts": experts,
        "moe_layer_freq": [int(has) for has in has_experts],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config.get("moe_intermediate_size") or config["intermediate_size"],
        "moe_shared_expert_intermediate_size": config.get("shared_expert_intermediate_size"),
        # whether probabilities are normalised over all experts or over the chosen ones
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
    }
    return settings | (_deepseek_expert_settings(config) if config["model_type"] in DEEPSEEK_TYPES else {})


def _deepseek_expert_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of DeepSeek's routers and shared experts."""
    is_v3 = config["model_type"] == "deepseek_v3"
    is_limited = is_v3 or config.get("topk_method") == "group_limited_greedy"
    return {
        "moe_shared_expert_intermediate_size": (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
        or None,
        "moe_router_num_groups": config["n_group"] if is_limited else None,
        "moe_router_group_topk": config["topk_group"] if is_limited else None,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_router_pre_softmax": not is_v3,
        "moe_router_score_function": "sigmoid" if is_v3 else "softmax",
        "moe_router_enable_expert_bias": is_v3,
        "moe_router_bias_update_rate": 0.0,  # Megatron's default would update the biases
    }


def enabled_attention_backend() -> AttnBackend:
    """Return the attention backend enabled by Transformer Engine's environment variables; `auto` without any.

    Megatron raises an error if they contradict its setting, as in ROLL configurations that set them in `system_envs`.
    """
    kinds = ("flash", "fused", "unfused")
    on = [kind for kind in kinds if os.environ.get(f"NVTE_{kind.upper()}_ATTN", "1") != "0"]
    if len(on) == len(kinds):
        return AttnBackend.auto
    for kind in on[1:]:  # keep the fastest one: Megatron cannot choose among two
        os.environ[f"NVTE_{kind.upper()}_ATTN"] = "0"
    return AttnBackend[on[0]] if on else AttnBackend.local
