"""Plans of Qwen3-Next and Qwen3.5: published sizes, layouts, memory, and the text part of multimodal models."""

import json
from pathlib import Path
from typing import Any

import pytest
from config_assets import write_model
from plan_sources import HYBRIDS, hybrid_config

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import Layout, ModelPlan, RolloutPlan, SamplingPlan
from roll_opd.models.layouts import check_layout
from roll_opd.models.megatron_support import unsupported
from roll_opd.models.memory import rollout_memory
from roll_opd.models.model_info import ModelFilesError, ModelInfo, read_model
from roll_opd.models.weight_files import lost_weights

BILLIONS = {  # of the text models, in the names of the releases
    "Qwen3-Next-80B-A3B": 80,
    "Qwen3.5-2B": 1.9,
    "Qwen3.5-27B": 27,
    "Qwen3.5-35B-A3B": 34.7,
    "Qwen3.5-122B-A10B": 122,
    "Qwen3.5-397B-A17B": 397,
}


def released(directory: Path, name: str, **changes: Any) -> ModelInfo:
    config = hybrid_config(name)
    assert config is not None
    (config.get("text_config") or config).update(changes)
    (directory / "config.json").write_text(json.dumps(config))
    return read_model(directory)


@pytest.mark.parametrize("name", HYBRIDS)
def test_parameters_are_those_in_the_name(tmp_path: Path, name: str) -> None:
    info = released(tmp_path, name)
    assert info.parameters == pytest.approx(BILLIONS[name] * 1e9, rel=0.01)
    assert not unsupported(tmp_path)


def test_sizes_of_a_layer_of_each_kind(tmp_path: Path) -> None:
    """Qwen3.5-27B by hand: 48 Gated DeltaNet layers and 16 with attention."""
    info = released(tmp_path, "Qwen3.5-27B")
    assert info.delta is not None and (sum(info.is_delta), info.attention_layers) == (48, 16)
    assert info.delta.channels == (2048, 2048, 6144) and info.delta.projected == 2048 * 2 + 6144 * 2 + 48 * 2
    assert info.cached_elements(1) == 2 * 16 * 4 * 256  # keys and values of attention only
    assert info.state_elements(2) == 48 * (48 * 128 * 128 + 3 * 10240) / 2


def test_a_cache_grows_with_tokens_and_a_state_does_not(tmp_path: Path) -> None:
    info = released(tmp_path, "Qwen3.5-27B")

    def cache(length: int) -> int:
        engines = RolloutPlan("engine", ModelPlan("m", "bf16"), (0,), 1, 1, SamplingPlan(max_new_tokens=1), length)
        return rollout_memory(info, engines, sequences=8)["kv_cache"]

    per_token, state = 2 * 2 * 16 * 4 * 256, 2 * int(info.state_elements(1))
    assert cache(1000) == 8 * (1000 * per_token + state) and cache(2000) == 8 * (2000 * per_token + state)


@pytest.mark.parametrize(("tp", "problems"), [(4, 0), (3, 1), (8, 0), (32, 1)])
def test_tensor_ranks_divide_the_heads_of_linear_attention(tmp_path: Path, tp: int, problems: int) -> None:
    info, diagnostics = released(tmp_path, "Qwen3.5-27B"), Diagnostics()
    check_layout(info, Layout(tp=tp), {}, diagnostics)
    found = [text for text in diagnostics.problems if "key heads of the linear attention" in text]
    assert len(found) == problems


def test_the_text_part_is_read_and_other_multimodal_models_are_not(tmp_path: Path) -> None:
    info = released(tmp_path, "Qwen3.5-2B")
    assert (info.model_type, info.tied, info.layers) == ("qwen3_5_text", True, 24)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "qwen3_vl"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFilesError, match="vision-language"):
        read_model(tmp_path)


def test_what_is_kept_counts_as_no_parameter(tmp_path: Path) -> None:
    shapes = {"model.language_model.embed_tokens.weight": (8, 4), "model.visual.x": (100, 4), "mtp.norm.weight": (50,)}
    write_model(tmp_path, weights=shapes)
    assert released(tmp_path, "Qwen3.5-2B").parameters == 32


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    released(tmp_path, "Qwen3.5-27B", **changes)
    assert any(sentence in problem for problem in unsupported(tmp_path))


def test_norms_around_one_may_be_zero_and_others_may_not(tmp_path: Path) -> None:
    names = [f"model.layers.0.{name}.weight" for name in ("input_layernorm", "linear_attn.norm", "mlp.up_proj")]
    write_model(tmp_path, weights=dict.fromkeys(names, (8, 4)))
    info = released(tmp_path, "Qwen3.5-27B")
    for tensor in info.tensors.values():
        with tensor.file.open("r+b") as file:
            file.seek(tensor.start)
            file.write(bytes(tensor.end - tensor.start))
    (found,) = lost_weights(info)
    assert found.startswith(f"{names[1]}, {names[2]} in {tmp_path}: all numbers are zero")
