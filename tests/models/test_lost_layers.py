"""Hints about lost layers: none for complete releases, some for shortened releases."""

from pathlib import Path

import pytest

from roll_opd.models.weight_files import lost_layer_hints

# name, layers, parameters in billions, max_window_layers: as published
RELEASES = [
    ("Qwen2.5-0.5B-Instruct", 24, 0.494, 21),
    ("Qwen2.5-7B", 28, 7.616, 28),
    ("Qwen2.5-72B", 80, 72.7, 80),
    ("Qwen3-0.6B", 28, 0.596, 28),
    ("Qwen3-8B", 36, 8.19, 36),
    ("Qwen3-30B-A3B", 48, 30.5, 48),
    ("Llama-3.2-1B", 16, 1.236, None),
    ("Mistral-7B-v0.3", 32, 7.248, None),
    ("Mixtral-8x7B-v0.1", 32, 46.7, None),
    ("DeepSeek-R1-Distill-Qwen-1.5B", 28, 1.777, 21),
]


@pytest.mark.parametrize(("name", "layers", "billions", "window"), RELEASES)
def test_releases_have_no_hints(name: str, layers: int, billions: float, window: int | None) -> None:
    assert list(lost_layer_hints(Path(name), layers, int(billions * 1e9), window)) == []


@pytest.mark.parametrize("name", ["frozen_lake_teacher", "model", "step_40b", "8x7b"])
def test_small_models_of_transformers_defaults_have_none(name: str) -> None:
    assert list(lost_layer_hints(Path(name), 4, 900_000, 28)) == []


def test_shortened_releases() -> None:
    (window,) = lost_layer_hints(Path("Qwen3-8B"), 35, 7_998_000_000, 36)
    assert window == "config.json has max_window_layers 36 and num_hidden_layers 35"
    _, name = lost_layer_hints(Path("Qwen3-8B"), 32, 7_420_000_000, 36)
    assert name == "its name implies 8 billion parameters, but its weights have 7.42 billion"
