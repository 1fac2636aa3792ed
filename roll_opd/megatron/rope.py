"""Rotary frequencies, taken from Hugging Face so that every scaling it knows means the same here."""

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def inverse_frequencies(hf_config: PretrainedConfig) -> torch.Tensor:
    """Return f32 [head width / 2]; for the types that `config.availability` lists."""
    parameters = hf_config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
        return frequencies.float()
    width = hf_config.__dict__.get("head_dim") or hf_config.hidden_size // hf_config.num_attention_heads
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    return 1.0 / parameters["rope_theta"] ** exponents
