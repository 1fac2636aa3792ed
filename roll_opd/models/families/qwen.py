"""Qwen2 and Qwen3: dense models, and mixtures of experts."""

from roll_opd.models.families.family_definition import Config, Family, Pieces
from roll_opd.models.families.parameter_names import EXPERTS, LLAMA, layer, shared_experts

SHARED_EXPERT = shared_experts("mlp.shared_expert") | {
    "mlp.shared_experts.gate_weight": layer("replicated", "mlp.shared_expert_gate.weight"),
}


def single_expert(config: Config, *, normalised: bool) -> tuple[str, ...]:
    """Return an error message if each token has a single expert and the weight of this expert is normalised.

    `normalised`: default of `norm_topk_prob`.
    """
    if config.get("norm_topk_prob", normalised) and config.get("num_experts_per_tok") == 1:
        return ("num_experts_per_tok=1 in config.json is not available: the router always outputs 1 and cannot learn",)
    return ()


def _qwen2(config: Config) -> Pieces:
    return Pieces(qkv_bias=True)


def _qwen3(config: Config) -> Pieces:
    return Pieces(query_key_norm="head")


def _problems(config: Config) -> tuple[str, ...]:
    return single_expert(config, normalised=False)


FAMILIES = (
    Family("qwen2", pieces=_qwen2),
    Family(
        "qwen2_moe",
        LLAMA | EXPERTS | SHARED_EXPERT,
        _qwen2,
        settings={"moe_shared_expert_gate": True},
        expects={"qkv_bias": True},
        problems=_problems,
    ),
    Family("qwen3", pieces=_qwen3),
    Family("qwen3_moe", LLAMA | EXPERTS, _qwen3, problems=_problems),
)
