"""Supported DeepSeek models, and the sizes in their plans; other models are refused with an error."""

import json
from pathlib import Path
from typing import Any

import pytest
from config_assets import write_safetensors

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import Layout, LoraPlan, MicroBatchLimits, ModelPlan, TrainPlan
from roll_opd.models.megatron_support import not_yet, unsupported
from roll_opd.models.model_info import read_model
from roll_opd.models.weight_files import weight_problems

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 10,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "rms_norm_eps": 1e-6,
}


def write(path: Path, model_type: str = "deepseek_v3", **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(SIZES | {"model_type": model_type} | config))
    return path


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_deepseek_models_with_yarn_are_supported(tmp_path: Path, model_type: str) -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert unsupported(write(tmp_path, model_type, rope_scaling=yarn, num_nextn_predict_layers=1)) == []


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("deepseek_v3", {"topk_method": "greedy"}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("deepseek_v3", {"num_experts_per_tok": 1}),
        ("deepseek_v3", {"num_key_value_heads": 1}),
        ("deepseek_v3", {"attention_bias": True}),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("deepseek_v2", {"topk_method": "noaux_tc"}),
        ("deepseek_v2", {"scoring_func": "sigmoid"}),
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v2", {"moe_layer_freq": 2}),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}),
    ],
)
def test_deepseek_configurations_that_megatron_lacks_are_refused(
    tmp_path: Path, model_type: str, config: dict[str, Any]
) -> None:
    (sentence,) = unsupported(write(tmp_path, model_type, **config))
    key = "rope type" if "rope_scaling" in config else next(iter(config))
    assert key in sentence and tmp_path.name in sentence


def test_deepseek_roles_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    def reported(model_type: str, **plan: Any) -> list[str]:
        model = ModelPlan(str(write(tmp_path, model_type)))
        return not_yet(TrainPlan("student", model, (0,), Layout(), MicroBatchLimits(), **plan))

    rate = FrozenDict({"moe_router_bias_update_rate": 0.001})
    assert reported("deepseek_v3", megatron_args=rate) == []
    (sentence,) = reported("deepseek_v2", megatron_args=rate)
    assert "moe_router_bias_update_rate" in sentence and "deepseek_v3" in sentence
    (sentence,) = reported("deepseek_v3", lora=LoraPlan(("q_proj",), 4, 8.0))
    assert "LoRA" in sentence
    (sentence,) = reported("deepseek_v3", megatron_args=FrozenDict({"moe_router_fusion": True}))
    assert "moe_router_fusion" in sentence


def test_layers_that_predict_further_tokens_count_for_nothing(tmp_path: Path) -> None:
    shapes = {"model.layers.2.input_layernorm.weight": (16,), "model.layers.3.eh_proj.weight": (16, 32)}
    write_safetensors(write(tmp_path, num_nextn_predict_layers=1) / "model.safetensors", shapes)
    assert read_model(tmp_path).parameters == 16


@pytest.mark.parametrize(("behind", "layers"), [("eh_proj.weight", None), ("mlp.gate.weight", 4)])
def test_layers_that_config_json_leaves_out_are_lost(tmp_path: Path, behind: str, layers: int | None) -> None:
    """Not those that predict further tokens."""
    path = write(tmp_path, num_hidden_layers=3, num_nextn_predict_layers=1)
    shapes = {f"model.layers.{number}.input_layernorm.weight": (16,) for number in range(4)}
    write_safetensors(path / "model.safetensors", shapes | {f"model.layers.3.{behind}": (16, 32)})
    lost = [problem for problem in weight_problems(read_model(path)) if "num_hidden_layers" in problem]
    assert len(lost) == (layers is not None) and all(f"have {layers} layers" in problem for problem in lost)


@pytest.mark.parametrize("query_rank", [6, None])
def test_parameters_from_sizes_alone(tmp_path: Path, query_rank: int | None) -> None:
    """As Hugging Face's model has them, but for the norms of latent vectors."""
    import transformers

    info = read_model(write(tmp_path, q_lora_rank=query_rank))
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES | {"q_lora_rank": query_rank}))
    norms = 3 * (10 + (query_rank or 0))
    assert info.parameters == sum(parameter.numel() for parameter in model.parameters()) - norms
    assert (info.head_dim, info.cached_elements(2)) == (9, 3 * 14)
