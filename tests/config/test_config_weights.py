"""Weights that are missing or do not fit config.json are reported by name before the start of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_assets import SIZES, shapes_of, write_model, write_safetensors

from roll_opd.models.model_info import ModelFilesError, read_model
from roll_opd.models.weight_files import lost_weights, weight_problems

LAYER = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        ({"num_hidden_layers": 3}, ["num_hidden_layers is 3, but the weights have 4 layers (0 to 3)"]),
        ({"num_hidden_layers": 5}, ["num_hidden_layers is 5, but the weights have 4 layers (0 to 3)"]),
        (
            {"intermediate_size": 40},
            ["layers.0.mlp.gate_proj.weight is 32x16, but config.json expects 40x16", "up_proj", "down_proj"],
        ),
        (
            {"num_key_value_heads": 4},
            ["layers.0.self_attn.k_proj.weight is 8x16, but config.json expects 16x16", "v_proj"],
        ),
        (
            {"num_attention_heads": 8, "head_dim": 2, "num_key_value_heads": 4},
            ["q_norm.weight is 4, but config.json expects 2"],
        ),
        ({"vocab_size": 9}, ["model.embed_tokens.weight is 8x16, but config.json expects 9x16", "lm_head.weight"]),
        ({"model_type": "llama"}, ["they have model.layers.0.self_attn.q_norm.weight, "]),
        ({"model_type": "qwen2"}, ["they have no model.layers.0.self_attn.q_proj.bias, ", "they have "]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings is true, but lm_head.weight is not model.embed"]),
    ],
)
def test_weights_that_another_configuration_made_are_named(
    tmp_path: Path, config: dict[str, Any], messages: list[str]
) -> None:
    write_model(tmp_path / "model", weights=shapes_of(SIZES), **config)
    found = " | ".join(weight_problems(read_model(tmp_path / "model")))
    assert all(message in found for message in messages), found


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_fit(tmp_path: Path, model_type: str, tied: bool) -> None:
    config = {"model_type": model_type, "tie_word_embeddings": tied}
    shapes = shapes_of({**SIZES, **config})
    info = read_model(write_model(tmp_path / "model", **config))
    assert (weight_problems(info), lost_weights(info)) == ([], [])
    write_safetensors(tmp_path / "model/model.safetensors", shapes | {"model.layers.0.rotary_emb.inv_freq": (2,)})
    assert weight_problems(read_model(tmp_path / "model")) == []


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in shapes_of(SIZES).items() if name not in (LAYER, "model.norm.weight")}
    write_model(tmp_path / "model", weights=shapes)
    (found,) = weight_problems(read_model(tmp_path / "model"))
    assert "they have no model.norm.weight, model.layers.3.mlp.up_proj.weight;" in found
    headless = {name: shape for name, shape in shapes_of(SIZES).items() if name != "lm_head.weight"}
    write_model(tmp_path / "model", weights=headless)
    (found,) = weight_problems(read_model(tmp_path / "model"))
    assert "they have no lm_head.weight, and tie_word_embeddings is not set" in found
    assert weight_problems(read_model(tmp_path / "model"), needs_head=False) == []  # a critic's


def test_quantised_weights(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model") / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"dtype": "F32"', b'"dtype": "I32"', 1))
    (found,) = weight_problems(read_model(tmp_path / "model"))
    assert "model.embed_tokens.weight: quantised weights (I32) are not available yet" in found


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "should contain a JSON object"),
        ({"weight_map": [1]}, "should map each weight"),
        ({"weight_map": {"a": 3}}, "should map each weight"),
        (
            {"weight_map": {"a": "model.safetensors"}},
            "model.safetensors lacks tensor a of the index",
        ),
    ],
)
def test_a_damaged_index(tmp_path: Path, index: Any, message: str) -> None:
    path = write_model(tmp_path / "model")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFilesError, match=message):
        read_model(path)


def _overwrite(path: Path, name: str, share: float, zero: bytes = bytes(4)) -> None:
    """Write zeros over the last `share` of a tensor."""
    tensor = read_model(path).tensors[name]
    size = int((tensor.end - tensor.start) * share) // 4 * 4
    with tensor.file.open("r+b") as file:
        file.seek(tensor.end - size)
        file.write(zero * (size // 4))


@pytest.mark.parametrize("zero", [bytes(4), b"\x00\x00\x00\x80"], ids=["0", "-0"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", LAYER])
def test_tensors_of_zeros_count_as_lost(tmp_path: Path, name: str, zero: bytes) -> None:
    path = write_model(tmp_path / "model")
    _overwrite(path, name, 1.0, zero)
    (found,) = lost_weights(read_model(path))
    assert found.startswith(f"{name} in {path}: all numbers are zero")


def test_a_layer_half_of_zeros_counts_as_lost_and_an_embedding_does_not(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", intermediate_size=4096, vocab_size=4096)
    _overwrite(path, LAYER, 0.6)
    _overwrite(path, "lm_head.weight", 0.6)  # a vocabulary may have many rows without a token
    (found,) = lost_weights(read_model(path))
    assert found.startswith(f"{LAYER} in {path}: half of the numbers are zero")


def test_the_planner_reports_weights_that_do_not_fit(problems: Callable[..., list[str]], root: Path) -> None:
    write_model(root / "teacher", seed=2, weights=shapes_of(SIZES), num_hidden_layers=3)
    (found,) = problems()
    assert found.startswith("teacher.model_args.model_name_or_path: the weights in ")
    assert "num_hidden_layers is 3, but" in found
