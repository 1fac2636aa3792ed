"""MiniMax-M2: norms over all heads, rotation of half of each head, and DeepSeek-V3's routers without groups."""

from roll_opd.models.families.deepseek import single_biased_expert
from roll_opd.models.families.family_definition import Config, Family, Pieces, rotated_share
from roll_opd.models.families.parameter_names import LLAMA, experts, layer

_BLOCK = "block_sparse_moe"
EXPERT_BIAS = {"mlp.router.expert_bias": layer("replicated", f"{_BLOCK}.e_score_correction_bias")}


def _minimax_m2(config: Config) -> Pieces:
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = config.get("rotary_dim") or width  # releases set `rotary_dim` instead of a fraction
    return Pieces(query_key_norm="heads", rotated=rotated_share(config, rotated / width))


def _problems(config: Config) -> tuple[str, ...]:
    found = single_biased_expert(config)
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        found += ("attn_type_list in config.json has layers of linear attention, which are not available yet",)
    return found


FAMILIES = (
    Family(
        "minimax_m2",
        LLAMA | experts(_BLOCK, "w1", "w3", "w2") | EXPERT_BIAS,
        _minimax_m2,
        settings={"moe_router_dtype": "fp32"},
        router="biased",
        expects={
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "router_jitter_noise": 0.0,
            "shared_intermediate_size": 0,
            "sliding_window": None,
        },
        rope_types=("default",),
        problems=_problems,
    ),
)
