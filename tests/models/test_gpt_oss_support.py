"""Which gpt-oss models and roles are supported; others are refused with an error."""

import json
from pathlib import Path
from typing import Any

import pytest

from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, TrainPlan
from roll_opd.models.supported import not_yet, unsupported

LAYERS = ["sliding_attention", "full_attention"]


def write(path: Path, **config: Any) -> str:
    sizes: dict[str, Any] = {"model_type": "gpt_oss", "num_hidden_layers": 2, "sliding_window": 128}
    sizes |= {"rope_scaling": {"rope_type": "yarn", "factor": 32.0}}
    (path / "config.json").write_text(json.dumps(sizes | {"layer_types": LAYERS} | config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({}, ()),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ()),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantised weights",)),
        ({"layer_types": LAYERS[::-1]}, ("should alternate",)),
    ],
)
def test_mxfp4_is_supported_and_other_formats_are_not(tmp_path: Path, config: dict, refused: tuple) -> None:
    write(tmp_path, **config)
    found = unsupported(tmp_path)
    assert len(found) == len(refused) and all(text in line for text, line in zip(refused, found, strict=True))


@pytest.mark.parametrize(
    ("kind", "expert_tp", "quantised", "refused"),
    [
        (MegatronPlan, 1, "mxfp4", ()),
        (MegatronPlan, 2, None, ("expert_tensor_parallel_size: 1",)),
        (TrainPlan, 1, None, ()),
        (TrainPlan, 1, "mxfp4", ("save the model in bf16",)),
    ],
)
def test_roles_with_whole_experts_are_supported(
    tmp_path: Path, kind: type[MegatronPlan], expert_tp: int, quantised: str | None, refused: tuple
) -> None:
    layout = Layout(tp=2, etp=expert_tp)
    path = write(tmp_path, quantization_config=quantised and {"quant_method": quantised})
    found = not_yet(kind("role", ModelPlan(path), (0, 1), layout, MicroBatchLimits()))
    assert len(found) == len(refused) and all(text in line for text, line in zip(refused, found, strict=True))
