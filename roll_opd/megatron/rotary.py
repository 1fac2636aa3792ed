"""Rotary embeddings of packed sequences: rotation of queries and keys, and the frequencies of scaled variants.

The rotation gives the same bits as megatron-core's rotation, with half as many passes over memory.

- megatron-core computes cosines and sines again in each layer, for queries and for keys, and concatenates halves twice.
  Here cosines and sines are computed once per pack, and the gradient is the inverse rotation.
- On a GPU, each call of megatron-core waits until the sequence lengths have been copied to the host.
- With context parallelism, megatron-core would compute positions from sequence lengths, which packs do not contain.

Legend: N packed tokens, H heads, D head width, R rotated width.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb as stock
from megatron.core.transformer import TransformerConfig, attention
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from roll_opd.models.families.family_definition import Pieces

# frequencies of a pack -> its cosines and signed sines
_CACHE: Any = WeakTensorKeyDictionary()


def apply_rotary(
    t_NHD: Tensor, freqs: Tensor, config: TransformerConfig, cu_seqlens: Tensor | None = None, **options: Any
) -> Tensor:
    """Rotate queries or keys [N, H, D] according to their positions. Replaces megatron-core's `apply_rotary_pos_emb`.

    With `apply_rope_fusion`, Transformer Engine's kernel computes the rotation in f32.

    Args:
        freqs: f32 [N, 1, 1, R], one row per token. Only the first R of the D elements of a head are rotated.
        cu_seqlens: int32 [2], start and end of the pack. It has two elements, because a pack is a single segment.
    """
    interleaved, factor = getattr(config, "pieces", Pieces()).interleaved, getattr(config, "rotary_factor", 1.0)
    if config.apply_rope_fusion and config.context_parallel_size == 1 and not interleaved and factor == 1.0:
        return stock(t_NHD, freqs, config, cu_seqlens, **options)
    usual = (
        cu_seqlens is not None
        and len(cu_seqlens) == 2
        and freqs.size(0) == t_NHD.size(0)
        and not config.rotary_interleaved
        and not config.multi_latent_attention
        and options.get("mscale", 1.0) == 1.0
    )
    if not usual:
        if config.context_parallel_size > 1:
            raise ValueError("these rotary embeddings do not support context parallelism; use context_parallel_size 1")
        return stock(t_NHD, freqs, config, cu_seqlens, **options)
    width = freqs.size(-1)
    if width == t_NHD.size(-1):
        return rotate(t_NHD, freqs, interleaved=interleaved)
    rotated = rotate(t_NHD[..., :width], freqs, interleaved=interleaved, factor=factor)
    return torch.cat([rotated, t_NHD[..., width:]], -1)


def rotate(t_NHD: Tensor, freqs: Tensor, *, interleaved: bool = False, factor: float = 1.0) -> Tensor:
    """Rotate queries or keys by the angles `freqs`, and multiply the result by `factor`.

    The result has the first elements of all pairs, and then the second elements of all pairs, also with `interleaved`.
    This order does not change attention scores, because queries and keys share it.

    Args:
        freqs: f32 [N, 1, 1, D].
        interleaved: whether the two elements of a pair are adjacent in `t_NHD`.
        factor: must be the same in all calls with the same `freqs`.
    """
    if interleaved:
        t_NHD = torch.cat([t_NHD[..., ::2], t_NHD[..., 1::2]], -1)
    if freqs not in _CACHE:
        _CACHE[freqs] = _cos_sin(freqs[:, 0], t_NHD.dtype, factor)
    return _Rotation.apply(t_NHD, *_CACHE[freqs])


def install_rotary() -> None:
    """Replace the rotation in Megatron's attention by `apply_rotary`, in this process only."""
    module: Any = attention
    module.apply_rotary_pos_emb = apply_rotary


def _cos_sin(freqs_N1D: Tensor, dtype: torch.dtype, factor: float) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines), multiplied by `factor`, each [N, 1, D]. The first half of the sines is negated."""
    first, second = torch.sin(freqs_N1D).chunk(2, -1)
    found = torch.cos(freqs_N1D), torch.cat([-first, second], -1)
    cosines, sines = found if factor == 1.0 else (each * factor for each in found)
    return cosines.to(dtype), sines.to(dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_N1D, sin_N1D)
        return _rotate(t_NHD, cos_N1D, sin_N1D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_N1D, sin_N1D = ctx.saved_tensors
        return _rotate(gradients[0], cos_N1D, -sin_N1D), None, None


def _rotate(t_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    half = t_NHD.size(-1) // 2
    return torch.cat([t_NHD[..., half:], t_NHD[..., :half]], -1).mul_(sin_N1D).add_(t_NHD * cos_N1D)


def rotary_kinds(pieces: Pieces) -> tuple[str, ...]:
    """Return the distinct keys of `rope_parameters` that a model's layers use."""
    return tuple(dict.fromkeys(key for key in pieces.rotary if key))


def rotary_frequencies(hf_config: PretrainedConfig, pieces: Pieces) -> dict[str, tuple[Tensor, float]]:
    """Return {kind of layer: (frequencies, factor)}. See `inverse_frequencies`."""
    kinds = rotary_kinds(pieces) or ("default",)
    return {kind: inverse_frequencies(hf_config, None if kind == "default" else kind) for kind in kinds}


def angles(positions_N: Tensor, frequencies: Sequence[Tensor]) -> Tensor:
    """Return the rotation angles of all tokens, [N, K, 1, R], for K kinds of frequencies.

    `frequencies`: for each kind, f32 [R/2].
    """
    angles_NKR = torch.stack([positions_N[:, None] * each for each in frequencies], 1)
    return torch.cat([angles_NKR, angles_NKR], -1)[:, :, None]


def inverse_frequencies(hf_config: PretrainedConfig, kind: str | None = None) -> tuple[Tensor, float]:
    """Return (frequencies, factor) of the rotation, with the same values as in transformers.

    - frequencies: f32 [rotated width / 2]
    - factor: cosines and sines are multiplied by it

    `megatron_support` lists the supported rope types. If `rope_parameters` has an entry per type of layer, `kind`
    selects the entry.
    """
    rope = hf_config.rope_parameters if kind is None else hf_config.rope_parameters[kind]
    if (scaled := _scaled_rope(hf_config, kind)) is not None:
        return scaled[0].float(), scaled[1]
    width = int(head_width(hf_config) * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    return 1.0 / rope["rope_theta"] ** exponents, 1.0


def partial_factor(hf_config: PretrainedConfig, pieces: Pieces) -> float:
    """Return the factor of cosines and sines, for models that rotate only a part of each head.

    For other models the result is 1, because their factor is applied in another way (see `scores_scaled`).
    """
    scaled = None if pieces.rotary or pieces.rotated == 1.0 else _scaled_rope(hf_config)
    return 1.0 if scaled is None else scaled[1]


def scores_scaled(hf_config: PretrainedConfig, pieces: Pieces) -> dict[str, float]:
    """Return Megatron's setting `softmax_scale`, for models that scale queries or have an attention factor.

    The rope types yarn and longrope have an attention factor. transformers multiplies cosines and sines by this factor.
    If complete heads are rotated, the scores are thus multiplied by its square. For other models the result is empty.
    """
    if hasattr(hf_config, "kv_lora_rank"):  # see `latent_scaling`
        return {}
    is_elsewhere = pieces.rotary or pieces.rotated < 1.0  # see `FamilyAttention` and `partial_factor`
    scaled = None if is_elsewhere else _scaled_rope(hf_config)
    factor = 1.0 if scaled is None else scaled[1]
    if factor == 1.0 and pieces.attention_scale is None:
        return {}
    return {"softmax_scale": factor**2 * (pieces.attention_scale or 1.0 / math.sqrt(head_width(hf_config)))}


def latent_scaling(hf_config: PretrainedConfig) -> tuple[float, float]:
    """Return (factor of rotated queries and keys, scale of scores) for latent attention.

    Only a part of queries and keys is rotated, so the scale of scores cannot include the factor. The scale of scores is
    mscale² / √(head width), with yarn's `mscale`.
    """
    scaled, rope = _scaled_rope(hf_config), hf_config.rope_parameters
    scale = 1.0 / math.sqrt(hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim)
    if scaled is None:
        return 1.0, scale
    factor, mscale = rope["factor"], rope.get("mscale_all_dim", 0)
    grown = 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scaled[1], scale * grown**2


def _scaled_rope(hf_config: PretrainedConfig, kind: str | None = None) -> tuple[Tensor, float] | None:
    """Return (frequencies, attention factor) as transformers computes them, or None for the default rope type."""
    rope = hf_config.rope_parameters if kind is None else hf_config.rope_parameters[kind]
    rope_type = rope.get("rope_type", "default")
    options = {} if kind is None else {"layer_type": kind}
    return None if rope_type == "default" else ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"), **options)


def head_width(hf_config: PretrainedConfig) -> int:
    """Return the width of a query or key."""
    return hf_config.__dict__.get("head_dim") or hf_config.hidden_size // hf_config.num_attention_heads
