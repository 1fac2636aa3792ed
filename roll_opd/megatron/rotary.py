"""Rotary embeddings of packed sequences: the bits of megatron-core's, in half of its passes over memory.

megatron-core computes cosines and sines again in each layer, for queries and for keys, and joins halves twice; on a GPU
it also waits each time until lengths have come to the host. Here a pack's are computed once, and the rotation's
gradient is the rotation back. Of a pack that is cut over context ranks, megatron-core would work out positions itself,
from sequences that it is not told of.

Legend: N packed tokens, H heads, D head width.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb as stock
from megatron.core.transformer import TransformerConfig, attention
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# a pack's frequencies -> cosines and signed sines
_OF_PACK: Any = WeakTensorKeyDictionary()


def rotated(
    t_NHD: Tensor, freqs: Tensor, config: TransformerConfig, cu_seqlens: Tensor | None = None, **options: Any
) -> Tensor:
    """Return queries or keys with their positions, as `megatron.core`'s `apply_rotary_pos_emb`.

    With `apply_rope_fusion` Transformer Engine's kernel does it, which keeps f32 to the end. `freqs` f32 [N, 1, 1, D]
    are the tokens' own; `cu_seqlens` int32 [2] bounds the one segment that they are.
    """
    if config.apply_rope_fusion and config.context_parallel_size == 1:
        return stock(t_NHD, freqs, config, cu_seqlens, **options)
    usual = (
        cu_seqlens is not None
        and len(cu_seqlens) == 2
        and freqs.size(0) == t_NHD.size(0)
        and freqs.size(-1) == t_NHD.size(-1)
        and not config.rotary_interleaved
        and not config.multi_latent_attention
        and options.get("mscale", 1.0) == 1.0
    )
    if not usual:
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism has no rotary embeddings of this kind; use context_parallel_size 1")
        return stock(t_NHD, freqs, config, cu_seqlens, **options)
    return turned(t_NHD, freqs)


def turned(t_NHD: Tensor, freqs: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return `t_NHD` rotated by `freqs` f32 [N, 1, 1, D]; with `interleaved`, each turned pair stands side by side.

    In what is returned the first of all pairs come first: scores do not depend on it.
    """
    if interleaved:
        t_NHD = torch.cat([t_NHD[..., ::2], t_NHD[..., 1::2]], -1)
    if freqs not in _OF_PACK:
        _OF_PACK[freqs] = _turns(freqs[:, 0], t_NHD.dtype)
    result: Tensor = _Rotation.apply(t_NHD, *_OF_PACK[freqs])
    return result


def install_rotation() -> None:
    """Have Megatron's attention rotate with `rotated` in this process."""
    heads: Any = attention
    heads.apply_rotary_pos_emb = rotated


def _turns(freqs_N1D: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines, and sines with the signs of the half that is turned into a place, each [N, 1, D]."""
    first, second = torch.sin(freqs_N1D).chunk(2, -1)
    return torch.cos(freqs_N1D).to(dtype), torch.cat([-first, second], -1).to(dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_N1D, sin_N1D)
        return _turn(t_NHD, cos_N1D, sin_N1D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_N1D, sin_N1D = ctx.saved_tensors
        return _turn(gradients[0], cos_N1D, -sin_N1D), None, None


def _turn(t_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    half = t_NHD.size(-1) // 2
    return torch.cat([t_NHD[..., half:], t_NHD[..., :half]], -1).mul_(sin_N1D).add_(t_NHD * cos_N1D)
