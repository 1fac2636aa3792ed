"""Megatron's configuration of a model, derived from its config.json, its family and the layout."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional
from transformers import PretrainedConfig

from roll_opd.config.plan import Layout
from roll_opd.models.families import FAMILIES
from roll_opd.models.families.family import Pieces
from roll_opd.models.model_info import EXPERT_COUNTS, layers_with_experts

ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}


def model_pieces(hf_config: PretrainedConfig) -> Pieces:
    """Return the description of a model's layers from its family."""
    return FAMILIES[hf_config.model_type].pieces(hf_config.to_dict())


def transformer_config(
    hf_config: PretrainedConfig, dtype: torch.dtype, layout: Layout, overrides: Mapping[str, Any]
) -> TransformerConfig:
    """Return Megatron's configuration of a model. Settings in `overrides` take precedence."""
    pieces = model_pieces(hf_config)
    settings = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": hf_config.__dict__.get("head_dim"),
        "ffn_hidden_size": hf_config.__dict__.get("intermediate_size") or hf_config.moe_intermediate_size,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        **_activation(pieces),
        "add_bias_linear": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "variable_seq_lengths": True,  # packs differ in length
        "moe_token_dispatcher_type": "alltoall",  # even for dense models: the default needs packs of equal length
        "batch_p2p_comm": False,
        "overlap_p2p_comm": layout.vpp is not None and layout.pp > 1,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "attention_backend": enabled_attention_backend(),
        "add_qkv_bias": pieces.qkv_bias,
        "qk_layernorm": bool(pieces.query_key_norm),
        "attention_output_gate": pieces.output_gate,
        "hetereogenous_dist_checkpoint": bool(pieces.mixers),  # layers have different parameters
        **_expert_settings(hf_config.to_dict()),
        **FAMILIES[hf_config.model_type].settings,
        **overrides,
    }
    if isinstance(settings.get("attention_backend"), str):
        settings["attention_backend"] = AttnBackend[settings["attention_backend"]]
    return TransformerConfig(**settings)


def _activation(pieces: Pieces) -> dict[str, Any]:
    """Return the settings of the MLP's activation function."""
    if pieces.clipped_swiglu is None:
        return {"activation_func": ACTIVATIONS[pieces.activation]}
    limit, alpha = pieces.clipped_swiglu
    return {
        "activation_func": lambda gate: gate * torch.sigmoid(alpha * gate),
        "activation_func_clamp_value": limit,
        "glu_linear_offset": 1.0,
    }


def has_experts(hf_config: PretrainedConfig) -> bool:
    """Return whether a model is a mixture of experts.

    With several tensor ranks, a mixture of experts needs sequence parallelism.
    """
    return bool(_expert_settings(hf_config.to_dict()))


def _expert_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's settings for the experts of a model. The result is empty for dense models."""
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
        # True: probabilities are normalised over all experts; False: over the chosen experts
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
    }
    router = FAMILIES[config["model_type"]].router
    if router == "softmax":
        return settings
    is_biased = router != "groups"
    settings |= {
        "moe_router_pre_softmax": not is_biased,
        "moe_router_score_function": "sigmoid" if is_biased else "softmax",
        "moe_router_enable_expert_bias": is_biased,
        "moe_router_bias_update_rate": 0.0,  # Megatron's default would update the biases
    }
    return settings if router == "biased" else settings | _grouped_experts(config, is_v3=is_biased)


def _grouped_experts(config: Mapping[str, Any], *, is_v3: bool) -> dict[str, Any]:
    """Return Megatron's settings for DeepSeek's shared experts and groups of experts."""
    is_limited = is_v3 or config.get("topk_method") == "group_limited_greedy"
    return {
        "moe_shared_expert_intermediate_size": (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
        or None,
        "moe_router_num_groups": config["n_group"] if is_limited else None,
        "moe_router_group_topk": config["topk_group"] if is_limited else None,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
    }


def enabled_attention_backend() -> AttnBackend:
    """Return the attention backend that Transformer Engine's environment variables enable.

    The result is `auto` if no backend is disabled. If several backends remain, the variables of all but the fastest are
    set to 0, because Megatron cannot choose between two.

    Megatron raises an error if these variables contradict its setting. ROLL configurations may set them in
    `system_envs`.
    """
    kinds = ("flash", "fused", "unfused")
    on = [kind for kind in kinds if os.environ.get(f"NVTE_{kind.upper()}_ATTN", "1") != "0"]
    if len(on) == len(kinds):
        return AttnBackend.auto
    for kind in on[1:]:  # keep only the fastest one, because Megatron cannot choose between two
        os.environ[f"NVTE_{kind.upper()}_ATTN"] = "0"
    return AttnBackend[on[0]] if on else AttnBackend.local
