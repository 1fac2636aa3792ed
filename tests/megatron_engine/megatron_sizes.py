"""Random sizes of a tiny model of every family; `ROLL_OPD_TEST_SIZES` is the seed. Imports no engine."""

import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from megatron_layouts import VOCABULARY
from transformers import AutoConfig, PreTrainedConfig

SEED = int(os.environ.get("ROLL_OPD_TEST_SIZES", "1"))
Sizes = dict[str, Any]
Draw = Callable[..., Any]  # choose one of the arguments
DENSE_LAYOUTS, MIXTURE_LAYOUTS = ("tp2", "pp2", "cp2"), ("tp2ep2", "pp2", "cp2ep2", "ep2")


def draw_config(family: str, seed: int = SEED) -> PreTrainedConfig:
    """Return the configuration of a model that two tensor ranks, stages, context ranks or expert ranks can split."""
    rng = np.random.default_rng([seed, zlib.crc32(family.encode())])

    def draw(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    sizes = _common(draw)
    return AutoConfig.for_model(family, **sizes | FAMILIES[family](draw, sizes))


def _common(draw: Draw) -> Sizes:
    groups, width = draw(2, 4), draw(12, 16, 20, 24, 32)
    heads = groups * draw(1, 2, 3)
    hidden = heads * width  # what families without `head_dim` need
    return {
        "vocab_size": VOCABULARY + draw(*range(40)),
        "hidden_size": hidden,
        "intermediate_size": draw(*range(40, 160, 2)),
        "num_hidden_layers": draw(2, 4, 6),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 256,
        "initializer_range": 0.6 / hidden**0.5,
        "rms_norm_eps": draw(1e-5, 1e-6),
        "tie_word_embeddings": draw(True, False),
        "pad_token_id": None,  # whose embedding transformers does not train
        "eos_token_id": 1,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(1e3, 1e4, 1e5)},
    }


def _wide(draw: Draw, sizes: Sizes) -> Sizes:
    """Return a head width that does not follow from the hidden size."""
    return {"head_dim": draw(12, 16, 20, 24, 32), "hidden_size": draw(*range(24, 104, 8)), "initializer_range": 0.08}


def _divisible(draw: Draw, sizes: Sizes) -> Sizes:
    """Return a hidden size that is a multiple of the heads, as transformers requires for some families."""
    heads = sizes["num_attention_heads"]
    return _wide(draw, sizes) | {"hidden_size": heads * draw(*range(-(-24 // heads), 104 // heads + 1))}


def _local(draw: Draw, sizes: Sizes) -> Sizes:
    kinds = [draw("sliding_attention", "full_attention") for _ in range(sizes["num_hidden_layers"])]
    return {"sliding_window": draw(*range(3, 21)), "layer_types": kinds}


def _local_experts(draw: Draw) -> Sizes:
    """Return experts whose width is `intermediate_size`."""
    count = draw(4, 6, 8)
    return {"num_local_experts": count, "num_experts_per_tok": draw(*range(2, count))}


def _experts(draw: Draw) -> Sizes:
    count = draw(4, 6, 8)
    chosen = draw(*range(2, count))
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": draw(*range(16, 64, 2))}


def _groups(draw: Draw) -> Sizes:
    """Return experts in groups: a token chooses among the experts of some groups."""
    groups, each = draw(1, 2, 4), draw(2, 4)
    kept = draw(*range(1, groups + 1))
    return {
        "n_routed_experts": groups * each,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": draw(*range(2, kept * each + 1)),
        "moe_intermediate_size": draw(*range(16, 64, 2)),
        "n_shared_experts": draw(1, 2),
        "routed_scaling_factor": draw(1.0, 1.7, 2.5),
    }


def _dense_or_sparse(draw: Draw, sizes: Sizes) -> Sizes:
    layers = sizes["num_hidden_layers"]
    return {"mlp_only_layers": [number for number in range(layers) if draw(True, False, False)]}


def _latent(draw: Draw, sizes: Sizes) -> Sizes:
    widths = {
        "kv_lora_rank": draw(*range(8, 40, 4)),
        "q_lora_rank": draw(None, 12, 18, 24),
        "qk_nope_head_dim": draw(8, 10, 16),
        "qk_rope_head_dim": draw(4, 6, 8),
        "v_head_dim": draw(8, 12, 20),
        "first_k_dense_replace": draw(*range(sizes["num_hidden_layers"])),
    }
    return _groups(draw) | widths | {"num_key_value_heads": sizes["num_attention_heads"]}


def _hybrid(draw: Draw, sizes: Sizes) -> Sizes:
    keys, layers = draw(2, 4), sizes["num_hidden_layers"]
    kinds = [draw("linear_attention", "linear_attention", "full_attention") for _ in range(layers - 2)]
    kinds.insert(draw(*range(layers - 1)), "full_attention")  # transformers needs one
    return _wide(draw, sizes) | {
        "layer_types": ["linear_attention", *kinds],
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw(1, 2, 3),
        "linear_key_head_dim": draw(8, 10, 16),
        "linear_value_head_dim": draw(8, 14, 20),
        "linear_conv_kernel_dim": draw(2, 3, 4),
        "rope_parameters": sizes["rope_parameters"] | {"partial_rotary_factor": draw(0.25, 0.5, 1.0)},
        "head_dim": draw(16, 24, 32),
    }


def _shared(draw: Draw) -> Sizes:
    return {"shared_expert_intermediate_size": draw(*range(16, 64, 2))}


def _gpt_oss(draw: Draw, sizes: Sizes) -> Sizes:
    kinds = ["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
    factor = draw(2, 4)
    yarn = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": 256 // factor}
    own = {"layer_types": kinds, "sliding_window": draw(*range(3, 21)), "swiglu_limit": draw(0.7, 2.0, 7.0)}
    own["rope_parameters"] = sizes["rope_parameters"] | yarn | {"truncate": False}
    return _wide(draw, sizes) | _local_experts(draw) | own


def _gemma(draw: Draw, sizes: Sizes) -> Sizes:
    own = {"query_pre_attn_scalar": draw(16, 20, 48), "tie_word_embeddings": True}
    return _divisible(draw, sizes) | _local(draw, sizes) | own


FAMILIES: dict[str, Callable[[Draw, Sizes], Sizes]] = {
    "llama": _divisible,
    "mistral": lambda draw, sizes: _wide(draw, sizes) | {"sliding_window": None},
    "qwen2": lambda draw, sizes: {},
    "qwen3": _wide,
    "qwen2_moe": lambda draw, sizes: _experts(draw) | _shared(draw) | _dense_or_sparse(draw, sizes),
    "qwen3_moe": lambda draw, sizes: (
        _wide(draw, sizes) | _experts(draw) | _dense_or_sparse(draw, sizes) | {"norm_topk_prob": draw(True, False)}
    ),
    "mixtral": lambda draw, sizes: _wide(draw, sizes) | _local_experts(draw) | {"sliding_window": None},
    "deepseek_v2": lambda draw, sizes: (
        _latent(draw, sizes) | {"topk_method": "group_limited_greedy", "norm_topk_prob": False}
    ),
    "deepseek_v3": lambda draw, sizes: _latent(draw, sizes) | {"norm_topk_prob": True, "num_nextn_predict_layers": 0},
    "smollm3": lambda draw, sizes: {"no_rope_layer_interval": draw(2, 3, 4), "attention_bias": draw(True, False)},
    "seed_oss": lambda draw, sizes: _wide(draw, sizes) | {"attention_out_bias": draw(True, False)},
    "olmo2": lambda draw, sizes: {},
    "olmo3": _local,
    "phi3": lambda draw, sizes: {"sliding_window": draw(None, *range(3, 21))},
    "glm4": lambda draw, sizes: _wide(draw, sizes) | {"attention_bias": draw(True, False), "head_dim": draw(16, 24)},
    "glm4_moe": lambda draw, sizes: (
        _wide(draw, sizes)
        | _groups(draw)
        | {"attention_bias": draw(True, False), "use_qk_norm": draw(True, False), "head_dim": draw(16, 24)}
        | {"first_k_dense_replace": draw(*range(sizes["num_hidden_layers"])), "num_mtp_layers": 0}
    ),
    "gemma2": lambda draw, sizes: (
        _gemma(draw, sizes) | {"attn_logit_softcapping": draw(0.5, 5.0), "final_logit_softcapping": draw(1.5, 10.0)}
    ),
    "gemma3_text": lambda draw, sizes: {**_gemma(draw, sizes), "rope_parameters": None},
    "gpt_oss": _gpt_oss,
    "minimax_m2": lambda draw, sizes: _wide(draw, sizes) | _local_experts(draw) | {"rotary_dim": draw(8, 12)},
    "qwen3_next": lambda draw, sizes: (
        _hybrid(draw, sizes) | _experts(draw) | _shared(draw) | _dense_or_sparse(draw, sizes)
    ),
    "qwen3_5_text": _hybrid,
    "qwen3_5_moe_text": lambda draw, sizes: _hybrid(draw, sizes) | _experts(draw) | _shared(draw),
}
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MIXTURES = (
    "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2",
    "qwen3_next", "qwen3_5_moe_text",
)  # fmt: skip
LAYOUTS = {family: MIXTURE_LAYOUTS if family in MIXTURES else DENSE_LAYOUTS for family in FAMILIES}
CASES = [(family, layout) for family, layouts in LAYOUTS.items() for layout in layouts]
