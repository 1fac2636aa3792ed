"""GLM-4: dense models, and mixtures of experts with DeepSeek-V3's routers.

The dense models have norms before and after attention and MLP, and fused gate and up matrices. In all models only a
part of each head is rotated. In dense models the two elements of a rotated pair are adjacent.
"""

from roll_opd.models.families.deepseek import single_biased_expert
from roll_opd.models.families.family_definition import Config, Family, Pieces, rotated_share
from roll_opd.models.families.parameter_names import (
    EXPERT_BIAS,
    EXPERTS,
    FUSED_GATE_UP,
    LLAMA,
    norms,
    shared_experts,
    without_norms,
)

ROPE_TYPES = ("default", "linear", "llama3")  # yarn would scale the part that is not rotated
NORMS = norms("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")


def _glm4(config: Config) -> Pieces:
    return Pieces(
        norms="both",
        qkv_bias=bool(config.get("attention_bias")),
        rotated=rotated_share(config, 0.5),
        interleaved=True,
    )


def _glm4_moe(config: Config) -> Pieces:
    return Pieces(
        qkv_bias=bool(config.get("attention_bias")),
        query_key_norm="head" if config.get("use_qk_norm") else "",
        rotated=rotated_share(config, 0.5),
    )


FAMILIES = (
    Family(
        "glm4",
        without_norms(LLAMA) | NORMS | FUSED_GATE_UP,
        _glm4,
        reads=("attention_bias",),
        rope_types=ROPE_TYPES,
        has_adapters=False,
    ),
    Family(
        "glm4_moe",
        LLAMA | EXPERTS | shared_experts("mlp.shared_experts") | EXPERT_BIAS,
        _glm4_moe,
        settings={"moe_router_dtype": "fp32"},
        router="biased_groups",
        expects={"norm_topk_prob": True},
        reads=("attention_bias",),
        rope_types=ROPE_TYPES,
        problems=single_biased_expert,
    ),
)
