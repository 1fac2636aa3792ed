"""Families other than Llama on CPUs: log-probs equal Hugging Face's, before and after a weight update."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inference_models import SIZES, Running, buckets_of, hf_logprobs, make_of, save_model, update_weights
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from roll_opd.config.plan import SamplingPlan

pytestmark = pytest.mark.nightly
PROMPTS = [list(range(2, 20)), [7]]
LOCAL: dict[str, Any] = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMPLIED = {name: size for name, size in SIZES.items() if name != "head_dim"}
LINEAR = SIZES | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # what the CPU kernels compute, in bf16 alone
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    **EXPERTS,
}
CONFIGS = {
    "gemma2": lambda: Gemma2Config(
        **SIZES, **LOCAL, query_pre_attn_scalar=20, attn_logit_softcapping=0.5, final_logit_softcapping=1.5
    ),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, **LOCAL, query_pre_attn_scalar=20),
    "glm4": lambda: Glm4Config(**SIZES, attention_bias=True),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SIZES, **EXPERTS, n_routed_experts=4, attention_bias=True, use_qk_norm=True, num_nextn_predict_layers=0
    ),
    "olmo2": lambda: Olmo2Config(**IMPLIED),
    "olmo3": lambda: Olmo3Config(**IMPLIED, **LOCAL),
    "phi3": lambda: Phi3Config(**IMPLIED, sliding_window=7),
    "seed_oss": lambda: SeedOssConfig(**SIZES, attention_out_bias=False),
    "smollm3": lambda: SmolLM3Config(**IMPLIED, no_rope_layer_interval=2),
}
HYBRIDS = {
    "qwen3_next": lambda: Qwen3NextConfig(**LINEAR),
}


def differences(running: Running, models: list[Any], seed: int) -> tuple[np.ndarray, ...]:
    """Return how far the engine's log-probs of its responses are from those of each model, each f32 [T]."""
    answers = running.batch(PROMPTS, SamplingPlan(max_new_tokens=16), range(seed, seed + len(PROMPTS)))
    found: list[list[np.ndarray]] = [[] for _ in models]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        whole = [*prompt, *answer.tokens.tolist()]
        for values, model in zip(found, models, strict=True):
            values.append(answer.logprobs - hf_logprobs(model, whole)[len(prompt) - 1 :])
    return tuple(np.concatenate(values) for values in found)


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_hugging_faces_before_and_after_new_weights(tmp_path: Path, warm: None, name: str) -> None:
    running = Running(save_model(make_of(CONFIGS[name](), seed=0), tmp_path))
    for seed in (0, 1):
        model = make_of(CONFIGS[name](), seed)
        if seed:
            running.run(update_weights(running.engine, buckets_of(model), version=seed))
        (difference,) = differences(running, [model], seed)
        assert np.abs(difference).max() <= 2e-5
    running.close()


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_differ_by_the_rounding_of_bf16(tmp_path: Path, warm: None, name: str) -> None:
    """The mean distance from exact log-probs is at most three times that of transformers in bf16."""
    running = Running(save_model(make_of(HYBRIDS[name](), seed=0).bfloat16(), tmp_path), "bf16")
    for seed in (0, 1):
        rounded = make_of(HYBRIDS[name](), seed).bfloat16()
        if seed:
            running.run(update_weights(running.engine, buckets_of(rounded), version=seed))
        exact = make_of(HYBRIDS[name](), seed)
        exact.load_state_dict({key: tensor.float() for key, tensor in rounded.state_dict().items()})
        from_rounded, from_exact = differences(running, [rounded, exact], seed)
        assert np.abs(from_exact).mean() <= 3 * np.abs(from_exact - from_rounded).mean()
    running.close()
