"""The layer spec: Transformer Engine's where it is installed on a GPU, otherwise a local one.

megatron-core's stock local spec refuses sequence parallelism (its norm) and packed sequences (its attention).
The two modules here lift both limits, with torch operations that exist on every device.

Legend: N packed tokens (times one batch), H local query heads, G local key/value heads, D head width,
B sequences in the pack, L the longest of them.
"""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from roll_opd.megatron.exact import VECTOR, ExactRowParallelLinear


class LocalRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked, so that Megatron sums its gradient over tensor ranks (sequence parallelism)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences with `scaled_dot_product_attention`.

    Sequences are laid out as the rows of one right-padded batch: under a causal mask a real query never sees the
    padding behind it, so no mask tensor is needed. Rows are sorted by length and cut into blocks whose padding
    is bounded, so that one long sequence does not inflate the rest.
    """

    MAX_PADDING = 2.0  # a block may hold at most so many times its real tokens

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError("attention_dropout must be 0: the log-probs of a model under dropout are not defined")
        if config.context_parallel_size > 1:
            raise ValueError("context_parallel_size > 1 needs Transformer Engine's attention")
        assert config.kv_channels is not None  # Megatron fills it in
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query_NHD: Tensor,
        key_NGD: Tensor,
        value_NGD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [N, H·D]; `packed_seq_params` gives the sequence boundaries."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params: every batch is packed here")
        boundaries = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in itertools.pairwise(boundaries)]
        out_NHD = torch.empty_like(query_NHD)
        pieces, indices = [], []
        for block in blocks_of_similar_length(lengths, self.MAX_PADDING):
            longest = -(-max(lengths[row] for row in block) // VECTOR) * VECTOR
            index, valid = _padded_index(block, boundaries, lengths, longest, query_NHD.device)
            q, k, v = (_rows(t, index, len(block), longest) for t in (query_NHD, key_NGD, value_NGD))
            if q.device.type == "cpu":  # where the backward pass of bf16 takes eight times that of f32
                q, k, v = q.float(), k.float(), v.float()
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
            pieces.append(out.transpose(1, 2).flatten(0, 1)[valid].to(query_NHD.dtype))
            indices.append(index[valid])
        out_NHD = out_NHD.index_copy(0, torch.cat(indices), torch.cat(pieces))
        return out_NHD.flatten(1)


def blocks_of_similar_length(lengths: list[int], max_padding: float) -> list[list[int]]:
    """Group row numbers, longest first, so that no block's padded size exceeds `max_padding` × its tokens."""
    blocks: list[list[int]] = []
    tokens = longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if lengths[row] == 0:
            continue
        if blocks and longest * (len(blocks[-1]) + 1) <= max_padding * (tokens + lengths[row]):
            blocks[-1].append(row)
            tokens += lengths[row]
        else:
            blocks.append([row])
            tokens = longest = lengths[row]
    return blocks


def _padded_index(
    block: list[int], boundaries: list[int], lengths: list[int], longest: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return where each cell of the padded block [B·L] comes from in the pack, and which cells are real."""
    starts = torch.tensor([boundaries[row] for row in block], device=device)
    sizes = torch.tensor([lengths[row] for row in block], device=device)
    offsets = torch.arange(longest, device=device)
    valid_BL = offsets[None, :] < sizes[:, None]
    index_BL = torch.where(valid_BL, starts[:, None] + offsets[None, :], starts[:, None])
    return index_BL.flatten(), valid_BL.flatten()


def _rows(packed: Tensor, index: Tensor, rows: int, longest: int) -> Tensor:
    """[N, heads, D] -> [B, heads, L, D]."""
    return packed[index].view(rows, longest, *packed.shape[1:]).transpose(1, 2)


def layer_spec(config: TransformerConfig, vp_stage: int | None, *, exact: bool) -> Any:
    """Return Transformer Engine's layers where they can run, else the local ones; `exact`: see `megatron.exact`."""
    if torch.cuda.is_available() and transformer_engine_installed():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
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


def transformer_engine_installed() -> bool:
    """Whether Transformer Engine can be imported here."""
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)
