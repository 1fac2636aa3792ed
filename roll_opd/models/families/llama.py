"""Llama, Mistral, Mixtral, and families that differ from them in a few parts.

- OLMo 2 and 3: norms after attention and MLP, query and key norms over all heads, and windows in OLMo 3
- Phi-3 and Phi-4: fused projections, and in some releases a window or longrope
- Seed-OSS: biases of queries, keys and values
- SmolLM3: some layers have no rotation
"""

from roll_opd.models.families.family_definition import (
    LONGROPE,
    Config,
    Family,
    Pieces,
    layer_kinds,
    positions,
    rotated_share,
    windows,
)
from roll_opd.models.families.parameter_names import FUSED_GATE_UP, FUSED_QKV, LLAMA, experts, norms, without_norms
from roll_opd.models.families.qwen import single_expert


def _missing_window(config: Config) -> tuple[str, ...]:
    if "sliding_window" in config:
        return ()
    return ("config.json lacks sliding_window, whose default is 4096; write null if the model has no windows",)


OLMO = without_norms(LLAMA) | norms("", "", "post_attention_layernorm", "post_feedforward_layernorm")


def _olmo2(config: Config) -> Pieces:
    return Pieces(norms="after", query_key_norm="heads")


def _olmo3(config: Config) -> Pieces:
    kinds = config.get("layer_types") or layer_kinds(config["num_hidden_layers"], 4)
    return Pieces(norms="after", query_key_norm="heads", windows=windows(config, period=4), rotary=tuple(kinds))


def _phi3(config: Config) -> Pieces:
    window = config.get("sliding_window") or 0
    every = (window,) * config["num_hidden_layers"] if 0 < window < positions(config)[0] else ()
    return Pieces(windows=every, rotated=rotated_share(config))


def _seed_oss(config: Config) -> Pieces:
    has_bias = bool(config.get("attention_bias", True))
    return Pieces(qkv_bias=has_bias, out_bias=bool(config.get("attention_out_bias")))


def _seed_oss_problems(config: Config) -> tuple[str, ...]:
    if config.get("attention_out_bias") and not config.get("attention_bias", True):
        return ("attention_out_bias without attention_bias in config.json is not available yet",)
    return ()


def _smollm3(config: Config) -> Pieces:
    layers, interval = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    rotates = config.get("no_rope_layers") or [(number + 1) % interval for number in range(layers)]
    return Pieces(
        rotary=tuple("default" if rotates[number] else "" for number in range(layers)),
        windows=windows(config) if config.get("use_sliding_window") else (),
        qkv_bias=bool(config.get("attention_bias")),
        out_bias=bool(config.get("attention_bias")),
    )


FAMILIES = (
    Family("llama"),
    Family("mistral", expects={"sliding_window": None}, problems=_missing_window),
    Family(
        "mixtral",
        LLAMA | experts("block_sparse_moe", "w1", "w3", "w2"),
        expects={"sliding_window": None},
        problems=lambda config: single_expert(config, normalised=True),
    ),
    Family("olmo2", OLMO, _olmo2),
    Family("olmo3", OLMO, _olmo3, reads=("layer_types",)),
    Family(
        "phi3",
        LLAMA | FUSED_QKV | FUSED_GATE_UP,
        _phi3,
        rope_types=("default", *LONGROPE),
        has_adapters=False,
    ),
    Family("seed_oss", pieces=_seed_oss, reads=("attention_bias",), problems=_seed_oss_problems),
    Family("smollm3", pieces=_smollm3, reads=("attention_bias", "use_sliding_window", "layer_types"), is_tied=True),
)
