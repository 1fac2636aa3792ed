"""Which gpt-oss models and roles are supported; others are refused with an error."""

import json
from pathlib import Path
from typing import Any

import pytest

from roll_opd.commands.main import main
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, TrainPlan
from roll_opd.models.layouts import check_layout
from roll_opd.models.megatron_support import not_yet, unsupported
from roll_opd.models.model_info import read_model

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
    ("kind", "quantised", "refused"),
    [
        (MegatronPlan, "mxfp4", ()),
        (TrainPlan, None, ()),
        (TrainPlan, "mxfp4", ("save the model in bf16",)),
    ],
)
def test_roles_with_whole_experts_are_supported(
    tmp_path: Path, kind: type[MegatronPlan], quantised: str | None, refused: tuple
) -> None:
    layout = Layout(tp=2, etp=1)
    path = write(tmp_path, quantization_config=quantised and {"quant_method": quantised})
    found = not_yet(kind("role", ModelPlan(path), (0, 1), layout, MicroBatchLimits()))
    assert len(found) == len(refused) and all(text in line for text, line in zip(refused, found, strict=True))


def test_no_command_splits_an_expert_with_a_bias(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 320, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256}
    path = write(tmp_path, **sizes)
    for layout in (
        Layout(tp=2),
        Layout(tp=2, etp=1),
        Layout(tp=4, etp=2, ep=2),
        Layout(dp=2, etp=2),
        Layout(dp=2, ep=2),
    ):
        diagnostics = Diagnostics()
        check_layout(read_model(Path(path)), layout, {}, diagnostics)
        found = [problem for problem in diagnostics.problems if problem.startswith("expert_tensor_parallel_size")]
        assert len(found) == (layout.expert_tp > 1), layout
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "tokens": [1, 2, 3], "prompt_length": 1}')
    assert main(["score", "--model", path, "--input", str(rows), "--output", f"{rows}.out", "--tp", "2"]) == 2
    assert "--expert-tp" in capsys.readouterr().err
    assert main(["serve", path, "--tp", "3"]) == 2  # 4 attention heads
    assert "--tp" in capsys.readouterr().err
