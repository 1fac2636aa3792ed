"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over packed sequences.

Keys and values of all heads are projected from one latent vector per token. All heads share the rotated part of a key.
This module materialises keys and values, and `PackedAttention` computes the attention.

Legend: n packed tokens of this context rank, s of them on this tensor rank (sequence parallelism), E hidden size, H
local heads, D width of a query or key, R width of its rotated part, W width of a value, C width of the latent vector.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from roll_opd.megatron.attention import PackedAttention
from roll_opd.megatron.local_layers import LocalRMSNorm
from roll_opd.megatron.packing import PackedSequences
from roll_opd.megatron.rotary import latent_scaling, rotate

NORM_EPSILON = 1e-6  # for the norms of latent vectors; as in transformers, rms_norm_eps has no effect on these norms


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of latent attention from config.json."""

    query_rank: int | None  # None: queries are projected from hidden states directly
    rank: int
    plain: int  # width of the unrotated part of queries and keys
    rotated: int
    value: int
    interleaved: bool  # the two elements of a rotated pair are adjacent
    rotated_factor: float
    scale: float  # factor of attention scores


def latent_sizes(hf_config: PretrainedConfig) -> LatentSizes | None:
    """Return the sizes of latent attention, or None for models without it."""
    if not hasattr(hf_config, "kv_lora_rank"):
        return None
    factor, scale = latent_scaling(hf_config)
    return LatentSizes(
        query_rank=hf_config.q_lora_rank,
        rank=hf_config.kv_lora_rank,
        plain=hf_config.qk_nope_head_dim,
        rotated=hf_config.qk_rope_head_dim,
        value=hf_config.v_head_dim,
        interleaved=bool(getattr(hf_config, "rope_interleave", True)),
        rotated_factor=factor,
        scale=scale,
    )


def latent_attention(linear_proj: Any) -> ModuleSpec:
    """Return the module spec of latent attention.

    `linear_proj`: class of the output projection.
    """
    return ModuleSpec(module=LatentSelfAttention, params={"linear_proj": linear_proj})


class DownProjection(torch.nn.Linear):
    """Linear layer that is replicated on all tensor ranks.

    With sequence parallelism, each rank applies the layer to its own tokens.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        device = torch.cuda.current_device()
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype, device=device)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


def _up_projection(options: dict[str, Any], inputs: int, outputs: int) -> ColumnParallelLinear:
    return ColumnParallelLinear(inputs, outputs, **options, gather_output=False, skip_bias_add=False)


class LatentSelfAttention(MegatronModule):
    """Latent attention, used as a layer's `self_attention`. The sizes are in `config.latent`."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, linear_proj: Any, attn_mask_type: Any = None, **groups: Any
    ) -> None:
        super().__init__(config)
        sizes: LatentSizes = config.latent  # type: ignore[attr-defined]
        self.sizes, heads = sizes, config.num_attention_heads
        self.local_heads = heads // config.tensor_model_parallel_size
        width = sizes.plain + sizes.rotated
        options: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        widening = partial(_up_projection, options)
        if sizes.query_rank:
            self.linear_q_down_proj = DownProjection(config, config.hidden_size, sizes.query_rank)
            self.q_layernorm = LocalRMSNorm(config, sizes.query_rank, NORM_EPSILON)
            self.linear_q_up_proj = widening(sizes.query_rank, heads * width)
        else:
            self.linear_q_proj = widening(config.hidden_size, heads * width)
        self.linear_kv_down_proj = DownProjection(config, config.hidden_size, sizes.rank + sizes.rotated)
        self.kv_layernorm = LocalRMSNorm(config, sizes.rank, NORM_EPSILON)
        self.linear_kv_up_proj = widening(sizes.rank, heads * (sizes.plain + sizes.value))
        self.core_attention = PackedAttention(config, layer_number, attn_mask_type, "self", sizes.scale)
        self.linear_proj = linear_proj(
            heads * sizes.value, config.hidden_size, **options, input_is_parallel=True, skip_bias_add=True
        )

    def forward(
        self,
        hidden_s1E: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias) of the output projection. The output is [s, 1, E].

        `rotary_pos_emb`: frequencies, f32 [n, 1, 1, R], one row per token.
        """
        query_nHD = self._queries(hidden_s1E, rotary_pos_emb)
        key_nHD, value_nHW = self._keys_and_values(hidden_s1E, rotary_pos_emb)
        attend: Any = partial(self.core_attention, packed_seq_params=packed_seq_params)
        recomputed = self.config.recompute_granularity == "selective"
        if recomputed and "core_attn" in (self.config.recompute_modules or ()) and torch.is_grad_enabled():
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        out_nX = attend(query_nHD, key_nHD, value_nHW, None)
        return self.linear_proj(out_nX[:, None])

    def _queries(self, hidden_s1E: Tensor, frequencies: Tensor) -> Tensor:
        if self.sizes.query_rank:
            wide_n1X, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_s1E)))
        else:
            wide_n1X, _ = self.linear_q_proj(hidden_s1E)
        plain, rotated = self._by_head(wide_n1X).split([self.sizes.plain, self.sizes.rotated], -1)
        return torch.cat([plain, self._rotated(rotated, frequencies)], -1)

    def _keys_and_values(self, hidden_s1E: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        latent_s1C, rotated_s1R = self.linear_kv_down_proj(hidden_s1E).split([sizes.rank, sizes.rotated], -1)
        wide_n1X, _ = self.linear_kv_up_proj(self.kv_layernorm(latent_s1C))
        plain, value_nHW = self._by_head(wide_n1X).split([sizes.plain, sizes.value], -1)
        # the gradient is summed over the heads of all tensor ranks
        if self.config.sequence_parallel:
            rotated_n1R = gather_from_sequence_parallel_region(rotated_s1R, tensor_parallel_output_grad=True)
        else:
            rotated_n1R = copy_to_tensor_model_parallel_region(rotated_s1R)
        of_all_heads = self._rotated(rotated_n1R, frequencies).expand(-1, self.local_heads, -1)
        return torch.cat([plain, of_all_heads], -1), value_nHW

    def _by_head(self, wide_n1X: Tensor) -> Tensor:
        return wide_n1X[:, 0].unflatten(-1, (self.local_heads, -1))

    def _rotated(self, t_nHR: Tensor, frequencies: Tensor) -> Tensor:
        found = rotate(t_nHR, frequencies, interleaved=self.sizes.interleaved)
        return found if self.sizes.rotated_factor == 1.0 else found * self.sizes.rotated_factor
