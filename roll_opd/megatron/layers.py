"""The layer spec: Transformer Engine's for bf16 and fp16 where it is installed on a GPU, otherwise a local one.

f32 is local everywhere: those are the numerics that are proven, and Transformer Engine multiplies f32 matrices in TF32.
megatron-core's stock local spec refuses sequence parallelism (its norm) and packed sequences (its attention); the norm
here and `PackedAttention` lift both limits, with torch operations that exist on every device.
"""

from importlib import metadata
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

from roll_opd.megatron.attention import PackedAttention, written_out
from roll_opd.megatron.deterministic_ops import ExactRowParallelLinear
from roll_opd.megatron.latent import latent_attention
from roll_opd.megatron.local_layers import DenseLayer, LocalRMSNorm, PackedSelfAttention, fits
from roll_opd.megatron.router import PackedRouter


def layer_spec(config: TransformerConfig, vp_stage: int | None, *, exact: bool, has_adapters: bool) -> Any:
    """Return Transformer Engine's layers where they can run, else the local ones.

    Those of mixtures of experts, and with latent attention, are local everywhere. `exact`: see
    `megatron.deterministic_ops`.
    """
    is_plain = getattr(config, "latent", None) is None and not config.num_moe_experts
    if is_plain and uses_transformer_engine(config.params_dtype):
        theirs: Any = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        attention = theirs.submodules.self_attention.submodules
        attends = transformer_engine_attends(
            torch.cuda.get_device_capability(),
            has_flash_attention=_is_installed("flash-attn"),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        attention.core_attention = written_out(attention.core_attention) if attends else PackedAttention
        if has_adapters:  # they read what the norm gives, which must then be no part of the linear layer
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

            theirs.submodules.input_layernorm = theirs.submodules.pre_mlp_layernorm = TENorm
            attention.linear_qkv = theirs.submodules.mlp.submodules.linear_fc1 = TEColumnParallelLinear
        return theirs
    of_layers = [_local_layer(config, experts, exact) for experts in _experts_of_layers(config, vp_stage)]
    norm: Any = LocalRMSNorm
    return TransformerBlockSubmodules(layer_specs=of_layers, layer_norm=norm)


def _experts_of_layers(config: TransformerConfig, vp_stage: int | None) -> list[int | None]:
    """Return how many experts each layer of this stage has; None: it is dense."""
    first = get_transformer_layer_offset(config, vp_stage)
    number = get_num_layers_to_build(config, vp_stage)
    pattern = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    assert isinstance(pattern, list)
    return [config.num_moe_experts if has else None for has in pattern[first : first + number]]


def _local_layer(config: TransformerConfig, experts: int | None, exact: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = LocalRMSNorm
    attention = layer.self_attention.submodules
    if exact:
        attention.linear_proj = ExactRowParallelLinear
        if experts is None:
            layer.mlp.submodules.linear_fc2 = ExactRowParallelLinear
    if experts is not None:
        layer.mlp.submodules.router = PackedRouter
    attention.core_attention = PackedAttention
    if getattr(config, "latent", None) is not None:
        layer.self_attention = latent_attention(attention.linear_proj)
    elif fits(config):
        layer.self_attention.module = PackedSelfAttention
        if experts is None:
            spec.module = DenseLayer
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = LocalRMSNorm
    return spec


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether layers of `dtype` are Transformer Engine's: on a GPU, where it is installed, and not f32."""
    return dtype is not torch.float32 and torch.cuda.is_available() and transformer_engine_installed()


def transformer_engine_attends(capability: tuple[int, int], *, has_flash_attention: bool, deterministic: bool) -> bool:
    """Whether Transformer Engine has attention over packs whose memory does not grow with the square of their length.

    Without flash-attn 2 it takes cuDNN's: of packs from compute capability 9.0 on; and there, where results are to be
    deterministic, not of long ones (`get_attention_backend` of its release 2.20).
    """
    return has_flash_attention or (capability >= (9, 0) and not deterministic)


def transformer_engine_installed() -> bool:
    """Whether Transformer Engine can be imported here."""
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False
