"""DeepSeek-V2 and DeepSeek-V3: multi-head latent attention, and experts that are routed by groups."""

from collections.abc import Iterator
from functools import partial

from roll_opd.models.families.family_definition import Config, Family
from roll_opd.models.families.parameter_names import EXPERT_BIAS, EXPERTS, LLAMA, layer, shared_experts

LATENT = {name: entry for name, entry in LLAMA.items() if "linear_qkv" not in name} | {
    "self_attention.linear_q_proj.weight": layer("rows", "self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": layer("replicated", "self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": layer("replicated", "self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": layer("rows", "self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": layer("replicated", "self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": layer("replicated", "self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": layer("rows", "self_attn.kv_b_proj.weight"),
}
TENSORS = LATENT | EXPERTS | shared_experts("mlp.shared_experts")
ROPE_TYPES = ("default", "yarn")  # vLLM treats all other types as yarn
V2_METHODS = (None, "greedy", "group_limited_greedy")


def single_biased_expert(config: Config) -> tuple[str, ...]:
    """Return an error message if each token has a single expert.

    Megatron does not normalise the weight of a single expert.
    """
    if config.get("num_experts_per_tok") == 1:
        return (
            "num_experts_per_tok=1 in config.json is not available yet: Megatron does not normalise the weight of a"
            " single expert",
        )
    return ()


def _problems(config: Config) -> Iterator[str]:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        yield f"num_key_value_heads={kv_heads!r} in config.json is not available yet (expected {heads}, one per head)"
    if config["model_type"] == "deepseek_v3":
        yield from single_biased_expert(config)
    if config["model_type"] == "deepseek_v2" and config.get("topk_method") not in V2_METHODS:
        known = " or ".join(map(repr, V2_METHODS[1:]))
        yield f"topk_method={config['topk_method']!r} in config.json is not available yet (expected {known})"


_deepseek = partial(
    Family,
    settings={"moe_router_dtype": "fp32"},
    rope_types=ROPE_TYPES,
    has_adapters=False,
    problems=lambda config: tuple(_problems(config)),
)
V2 = {"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1}
V3 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "moe_layer_freq": 1}
FAMILIES = (
    _deepseek("deepseek_v2", TENSORS, router="groups", expects=V2),
    _deepseek("deepseek_v3", TENSORS | EXPERT_BIAS, router="biased_groups", expects=V3),
)
