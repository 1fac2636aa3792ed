"""The layer spec: Transformer Engine's where it is installed on a GPU, otherwise a local one.

megatron-core's stock local spec refuses sequence parallelism (its norm) and packed sequences (its attention); the norm
here and `PackedAttention` lift both limits, with torch operations that exist on every device.
"""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from roll_opd.megatron.attention import PackedAttention, written_out
from roll_opd.megatron.exact import ExactRowParallelLinear


class LocalRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked, so that Megatron sums its gradient over tensor ranks (sequence parallelism)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


def layer_spec(config: TransformerConfig, vp_stage: int | None, *, exact: bool, has_adapters: bool) -> Any:
    """Return Transformer Engine's layers where they can run, else the local ones; `exact`: see `megatron.exact`."""
    if uses_transformer_engine():
        theirs: Any = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        attention = theirs.submodules.self_attention.submodules
        attention.core_attention = written_out(attention.core_attention)
        if has_adapters:  # they read what the norm gives, which must then be no part of the linear layer
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

            theirs.submodules.input_layernorm = theirs.submodules.pre_mlp_layernorm = TENorm
            attention.linear_qkv = theirs.submodules.mlp.submodules.linear_fc1 = TEColumnParallelLinear
        return theirs
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = LocalRMSNorm
    attention = layer.self_attention.submodules
    if exact:
        attention.linear_proj = layer.mlp.submodules.linear_fc2 = ExactRowParallelLinear
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = LocalRMSNorm
    norm: Any = LocalRMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config, vp_stage), layer_norm=norm)


def uses_transformer_engine() -> bool:
    """Whether layers are Transformer Engine's: on a GPU, where it is installed."""
    return torch.cuda.is_available() and transformer_engine_installed()


def transformer_engine_installed() -> bool:
    """Whether Transformer Engine can be imported here."""
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)
