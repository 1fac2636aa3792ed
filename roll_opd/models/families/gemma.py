"""Gemma 3 text models: separate rotations in local and global layers, scaled embeddings, norms before and after."""

import math

from roll_opd.models.families.family import LLAMA, Config, Family, Pieces, layer_kinds, norms, windows, without_norms

NORMS = norms("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")


def _gemma3(config: Config) -> Pieces:
    period = config.get("sliding_window_pattern") or 6
    kinds = config.get("layer_types") or layer_kinds(config["num_hidden_layers"], period)
    return Pieces(
        query_key_norm="head",
        norms="both",
        zero_centred_norms=True,
        windows=windows(config, period=period),
        rotary=tuple(kinds),
        attention_scale=1.0 / math.sqrt(config.get("query_pre_attn_scalar") or 256),
        activation="gelu_tanh",
        embedding_scale=math.sqrt(config["hidden_size"]),
    )


FAMILIES = (
    Family(
        "gemma3_text",
        without_norms(LLAMA) | NORMS,
        _gemma3,
        expects={"hidden_activation": "gelu_pytorch_tanh"},
        reads=("layer_types",),
    ),
)
