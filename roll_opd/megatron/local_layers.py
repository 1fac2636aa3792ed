"""Modules of local layers: RMSNorm for every device, and a dense layer with few kernels for half precision on GPUs.

`DenseLayer` and `PackedSelfAttention` have the same parameters as Megatron's modules. One Triton kernel computes the
norms and the rotation of queries and keys. A second kernel computes SwiGLU (see `layer_kernels`).
"""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from roll_opd.megatron.packing import PackedSequences


class LocalRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that supports sequence parallelism, unlike megatron-core's local norm.

    The weight has the attribute `sequence_parallel`, so Megatron sums its gradient over tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


# frequencies of a pack -> cosines and sines, f32 [n, D/2]
_CACHE: Any = WeakTensorKeyDictionary()


def fits(config: TransformerConfig) -> bool:
    """Return whether `DenseLayer` and `PackedSelfAttention` support this configuration."""
    plain_attention = not (config.rotary_interleaved or config.attention_output_gate or config.no_rope_freq)
    plain_mlp = config.activation_func is functional.silu and config.gated_linear_unit and not config.add_bias_linear
    return (
        torch.cuda.is_available()
        and config.params_dtype is not torch.float32
        and config.context_parallel_size == 1
        and (config.num_query_groups or 0) >= config.tensor_model_parallel_size
        and config.recompute_granularity != "selective"
        and plain_attention
        and plain_mlp
    )


class DenseLayer(TransformerLayer):
    """Transformer layer over a pack: norm, attention, residual addition, norm, SwiGLU, residual addition."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Skip Megatron's checks for CUDA graphs."""
        return torch.nn.Module.__call__(self, *args, **settings)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, context: Tensor | None = None, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, context). The output is [s, 1, E].

        `given`: includes `packed_seq_params` (the pack) and `rotary_pos_emb` (the rotary frequencies of its tokens).
        """
        pack = {name: given[name] for name in ("rotary_pos_emb", "packed_seq_params")}
        attended, bias = self.self_attention(self.input_layernorm(hidden_states), **pack)
        hidden_states = hidden_states + (attended if bias is None else attended + bias)
        return hidden_states + self._mlp(self.pre_mlp_layernorm(hidden_states)), context

    def _mlp(self, hidden_states: Tensor) -> Tensor:
        from roll_opd.megatron.layer_kernels import SwiGLU

        both, _ = self.mlp.linear_fc1(hidden_states)
        output: Tensor = self.mlp.linear_fc2(SwiGLU.apply(both))[0]
        return output


class PackedSelfAttention(SelfAttention):
    """Self-attention over a pack: projection, fused norm and rotation, attention, projection."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias) of the output projection. The output is [n, 1, E].

        `rotary_pos_emb`: frequencies, f32 [n, 1, 1, D], one row per token.
        """
        from roll_opd.megatron.layer_kernels import NormAndRotate

        linear: Any = self.linear_qkv
        attend: Any = self.core_attention
        mixed_n1X, _ = linear(hidden_states)
        sizes = (
            self.num_attention_heads_per_partition,
            self.num_query_groups_per_partition,
            self.hidden_size_per_attention_head,
        )
        weights = [getattr(norm, "weight", None) for norm in (self.q_layernorm, self.k_layernorm)]
        query_nHD, key_nGD, value_nGD = NormAndRotate.apply(
            mixed_n1X.flatten(0, 1), *weights, *cos_sin(rotary_pos_emb), sizes, self.config.layernorm_epsilon
        )
        out_nX = attend(query_nHD, key_nGD, value_nGD, None, packed_seq_params=packed_seq_params)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(out_nX[:, None])
        return output


def cos_sin(freqs_n11D: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines) of a pack, each f32 [n, D/2].

    The result is cached, so it is computed once for all layers.
    """
    if freqs_n11D not in _CACHE:
        angles = freqs_n11D[:, 0, 0, : freqs_n11D.size(-1) // 2]
        _CACHE[freqs_n11D] = angles.cos().contiguous(), angles.sin().contiguous()
    found: tuple[Tensor, Tensor] = _CACHE[freqs_n11D]
    return found
