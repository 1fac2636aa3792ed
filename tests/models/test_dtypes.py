"""The dtype in an exported config.json, with which transformers then loads the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from config_assets import SIZES, write_model
from transformers import AutoConfig

from roll_opd.models.model_files import with_dtype


@pytest.mark.parametrize(
    "keys",
    [{}, {"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16", "torch_dtype": "float16"}],
    ids=str,
)
def test_every_key_that_is_there(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = with_dtype({**SIZES, **keys}, "float32")
    assert {key: config[key] for key in keys or ["dtype"]} == dict.fromkeys(keys or ["dtype"], "float32")
    assert config.keys() == {*SIZES, *(keys or ["dtype"])}
    path = write_model(tmp_path / "model")
    (path / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(path).dtype == torch.float32


def test_inner_models_and_nothing_else() -> None:
    given = {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16", "hidden_size": 4, "rope_config": {"base": 1}},
        "quantization_config": {"bits": 4},
        "rope_scaling": {"dtype": "kept"},
    }
    assert with_dtype(given, "float32") == {
        "dtype": "float32",
        "text_config": {"torch_dtype": "float32", "hidden_size": 4, "rope_config": {"base": 1}},
        "quantization_config": {"bits": 4},
        "rope_scaling": {"dtype": "kept"},
    }
    assert given["dtype"] == "bfloat16"
