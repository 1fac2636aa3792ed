"""Rotary frequencies, and what scaled ones do to attention's scores: Hugging Face's own numbers."""

import math

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def inverse_frequencies(hf_config: PretrainedConfig) -> Tensor:
    """Return the rotary frequencies, f32 [head width / 2], for the rope types that `supported` lists.

    They are Hugging Face's own, so that every scaling means the same here.
    """
    if (scaled := _scaled_rope(hf_config)) is not None:
        return scaled[0].float()
    width = _head_width(hf_config)
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    return 1.0 / hf_config.rope_parameters["rope_theta"] ** exponents


def scores_scaled(hf_config: PretrainedConfig) -> dict[str, float]:
    """Return Megatron's `softmax_scale` where rotated queries and keys are to be longer than they were (yarn).

    Hugging Face multiplies cosines and sines by that factor, so scores by its square.
    """
    scaled = _scaled_rope(hf_config)
    if scaled is None or scaled[1] == 1.0 or hasattr(hf_config, "kv_lora_rank"):  # see `latent_scaling`
        return {}
    return {"softmax_scale": scaled[1] ** 2 / math.sqrt(_head_width(hf_config))}


def latent_scaling(hf_config: PretrainedConfig) -> tuple[float, float]:
    """Return, of latent attention, the factor of rotated queries and keys, and that of scores.

    Of queries and keys only a part is rotated, so the first cannot be a factor of scores. The second is the square of
    yarn's `mscale`, times what scores of that width are divided by.
    """
    scaled, rope = _scaled_rope(hf_config), hf_config.rope_parameters
    scale = 1.0 / math.sqrt(hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim)
    if scaled is None:
        return 1.0, scale
    factor, mscale = rope["factor"], rope.get("mscale_all_dim", 0)
    grown = 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scaled[1], scale * grown**2


def _scaled_rope(hf_config: PretrainedConfig) -> tuple[Tensor, float] | None:
    """Return Hugging Face's rotary frequencies and factor of queries and keys; None where nothing is scaled."""
    rope_type = hf_config.rope_parameters.get("rope_type", "default")
    return None if rope_type == "default" else ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"))


def _head_width(hf_config: PretrainedConfig) -> int:
    return hf_config.__dict__.get("head_dim") or hf_config.hidden_size // hf_config.num_attention_heads
