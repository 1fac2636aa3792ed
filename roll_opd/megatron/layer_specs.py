"""Layer specs: Transformer Engine's layers for bf16 and fp16 on a GPU if it is installed, otherwise local layers.

f32 layers are always local. The numerical tests need f32, but Transformer Engine multiplies f32 matrices in TF32.

megatron-core's local spec has two gaps: its norm does not support sequence parallelism, and its attention does not
support packed sequences. `LocalRMSNorm` and `PackedAttention` close these gaps on every device. The module
`local_layers` also has the layers of model families that differ from Llama's.
"""

import os
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from roll_opd.base.installed import version_of
from roll_opd.megatron.attention import PackedAttention, with_expanded_packs
from roll_opd.megatron.deterministic_ops import ExactRowParallelLinear
from roll_opd.megatron.gated_delta_net import gated_delta_net
from roll_opd.megatron.latent_attention import latent_attention
from roll_opd.megatron.local_layers import (
    BiasedExperts,
    DenseLayer,
    ExpertOutput,
    FamilyAttention,
    PackedSelfAttention,
    fits,
    norm_class,
    pieces_of,
    place_norms,
    query_key_norm,
)
from roll_opd.megatron.router import PackedRouter
from roll_opd.models.families.family_definition import DELTA

TRANSFORMER_ENGINE = "ROLL_OPD_TRANSFORMER_ENGINE"  # environment variable; 0: local layers even if it is installed


def layer_spec(config: TransformerConfig, vp_stage: int | None, *, exact: bool, has_adapters: bool) -> Any:
    """Return the layer spec of a pipeline stage: Transformer Engine's layers if supported, else local layers.

    All layers of a model are local if the model has experts, latent attention or additions of its family. For `exact`
    see `megatron.deterministic_ops`.
    """
    is_plain = getattr(config, "latent", None) is None and not config.num_moe_experts and pieces_of(config).is_plain
    if is_plain and uses_transformer_engine(config.params_dtype):
        spec: Any = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        attention = spec.submodules.self_attention.submodules
        attends = transformer_engine_attends(
            torch.cuda.get_device_capability(),
            has_flash_attention=bool(version_of("flash-attn")),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        attention.core_attention = with_expanded_packs(attention.core_attention) if attends else PackedAttention
        if has_adapters:  # adapters read the norm's output, so it must not be fused into the linear layer
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TENorm
            attention.linear_qkv = spec.submodules.mlp.submodules.linear_fc1 = TEColumnParallelLinear
        return spec
    first = get_transformer_layer_offset(config, vp_stage)
    layers = [
        _local_layer(config, first + number, experts, exact)
        for number, experts in enumerate(_layer_experts(config, vp_stage))
    ]
    norm: Any = norm_class(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layer_experts(config: TransformerConfig, vp_stage: int | None) -> list[int | None]:
    """Return the number of experts of each layer in this stage, or None for a dense layer."""
    first = get_transformer_layer_offset(config, vp_stage)
    number = get_num_layers_to_build(config, vp_stage)
    pattern = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    assert isinstance(pattern, list)
    return [config.num_moe_experts if has else None for has in pattern[first : first + number]]


def _local_layer(config: TransformerConfig, number: int, experts: int | None, exact: bool) -> ModuleSpec:
    """Return the local spec of one layer.

    `number`: layer number, counted from 0 over all stages.
    """
    spec = get_gpt_layer_local_spec(experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer: Any = spec.submodules
    place_norms(layer, config)
    attention = layer.self_attention.submodules
    if exact:
        attention.linear_proj = ExactRowParallelLinear
        if experts is None:
            layer.mlp.submodules.linear_fc2 = ExactRowParallelLinear
    if experts is not None:
        layer.mlp.submodules.router = PackedRouter
        if pieces_of(config).expert_bias:
            layer.mlp.submodules.experts.module = BiasedExperts
            layer.mlp.submodules.experts.submodules.linear_fc2 = ExpertOutput
    attention.core_attention = PackedAttention
    if getattr(config, "latent", None) is not None:
        layer.self_attention = latent_attention(attention.linear_proj)
    elif pieces_of(config).mixers and pieces_of(config).mixers[number] == DELTA:
        layer.self_attention = gated_delta_net(attention.linear_proj)
    elif not pieces_of(config).is_plain:
        layer.self_attention.module = FamilyAttention
    elif fits(config):
        layer.self_attention.module = PackedSelfAttention
        if experts is None:
            spec.module = DenseLayer
    if config.qk_layernorm:
        attention.q_layernorm = query_key_norm(config, config.num_attention_heads)
        attention.k_layernorm = query_key_norm(config, config.num_query_groups or config.num_attention_heads)
    return spec


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Return whether layers of `dtype` come from Transformer Engine.

    This is the case on a GPU if Transformer Engine is installed and not disabled, and `dtype` is not f32.
    """
    is_enabled = os.environ.get(TRANSFORMER_ENGINE) != "0"
    return is_enabled and dtype is not torch.float32 and torch.cuda.is_available() and transformer_engine_installed()


def transformer_engine_attends(capability: tuple[int, int], *, has_flash_attention: bool, deterministic: bool) -> bool:
    """Return whether the memory of Transformer Engine's attention is linear in the pack length.

    With flash-attn 2 it is linear. Without flash-attn 2, Transformer Engine uses cuDNN's attention. cuDNN supports
    packs from compute capability 9.0 on. It supports long packs only if the results need not be deterministic (see
    `get_attention_backend` in release 2.20).
    """
    return has_flash_attention or (capability >= (9, 0) and not deterministic)


def transformer_engine_installed() -> bool:
    """Return whether Transformer Engine can be imported."""
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)
