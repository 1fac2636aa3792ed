"""FLOPs of a forward pass, computed from config.json, against torch's counter on Hugging Face's models and loops."""

from pathlib import Path
from typing import Any

import megatron_models as models
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from roll_opd.models.flops import forward_flops, keys_seen
from roll_opd.models.model_info import read_model

LENGTH = 16
MODELS = (
    *("qwen3", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gemma2", "phi3", "glm4_moe", "gpt_oss", "minimax_m2"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
)


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_that_torch_counts(tmp_path: Path, name: str) -> None:
    """Hugging Face computes scores of all keys, also of masked ones, and convolves padding.

    Its Gated DeltaNet computes chunks, by batched products; our count is of the recurrence.
    """
    config = models.CONFIGS[name]()
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    config.save_pretrained(tmp_path)
    info = read_model(tmp_path)
    with FlopCounterMode(display=False, depth=4) as counter, torch.no_grad():
        model(torch.arange(LENGTH)[None], use_cache=False)
    wanted = counter.get_total_flops()
    for module, counts in counter.get_flop_counts().items():
        if module.endswith(".linear_attn"):
            wanted -= counts[torch.ops.aten.bmm]
            wanted -= 2 * sum(info.delta.channels) * info.delta.taps * (info.delta.taps - 1)
    found = forward_flops(info, LENGTH, lambda window: LENGTH**2, LENGTH)
    assert found - recurrence(info) * LENGTH == pytest.approx(wanted, rel=1e-9)


def recurrence(info: Any) -> float:
    """FLOPs a token: the state of each head is read for its key, updated by an outer product, read for its query."""
    if info.delta is None:
        return 0.0
    state = torch.zeros(info.delta.key_width, info.delta.value_width)
    with FlopCounterMode(display=False) as counter:
        key, value = torch.zeros(1, info.delta.key_width), torch.zeros(1, info.delta.value_width)
        state = state + key.T @ (value - key @ state)
        _ = key @ state
    return counter.get_total_flops() * info.delta.value_heads * sum(info.is_delta)


@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_keys_are_those_that_each_token_sees(window: int) -> None:
    for first, end in ((0, 1), (0, 20), (3, 4), (4, 17), (9, 60)):
        wanted = sum(min(place + 1, window or place + 1) for place in range(first, end))
        assert keys_seen(first, end, window) == wanted
