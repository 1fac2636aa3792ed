"""Gemma 2 and the text models of Gemma 3.

Both have local and global layers, scaled embeddings, and norms before and after attention and MLP. Gemma 2 caps
attention scores and logits. In Gemma 3, local and global layers have different rotary frequencies.
"""

import math
from functools import partial
from typing import Any

from roll_opd.models.families.family_definition import Config, Family, Pieces, layer_kinds, windows
from roll_opd.models.families.parameter_names import LLAMA, norms, without_norms

NORMS = norms("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")


def _common(config: Config) -> dict[str, Any]:
    return {
        "norms": "both",
        "zero_centred_norms": True,
        "attention_scale": 1.0 / math.sqrt(config.get("query_pre_attn_scalar") or 256),
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(config["hidden_size"]),
    }


def _gemma2(config: Config) -> Pieces:
    return Pieces(
        windows=windows(config, period=2),
        score_cap=config.get("attn_logit_softcapping", 50.0),
        logit_cap=config.get("final_logit_softcapping", 30.0),
        **_common(config),
    )


def _gemma3(config: Config) -> Pieces:
    period = config.get("sliding_window_pattern") or 6
    kinds = config.get("layer_types") or layer_kinds(config["num_hidden_layers"], period)
    return Pieces(query_key_norm="head", windows=windows(config, period=period), rotary=tuple(kinds), **_common(config))


_gemma = partial(
    Family, tensors=without_norms(LLAMA) | NORMS, expects={"hidden_activation": "gelu_pytorch_tanh"}, is_tied=True
)
FAMILIES = (
    _gemma("gemma2", pieces=_gemma2, reads=("layer_types", "attn_logit_softcapping", "final_logit_softcapping")),
    _gemma("gemma3_text", pieces=_gemma3, reads=("layer_types",)),
)
