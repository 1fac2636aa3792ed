"""`roll-opd check-model`: a correct model, tensors that differ, and unsupported models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from inference_models import make_hybrid, save_model
from safetensors.torch import load_file, save_file

from roll_opd.commands import check_model
from roll_opd.commands.main import main
from roll_opd.models.model_info import read_model

STUDENT = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"


def test_a_model_of_another_type_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((STUDENT / "config.json").read_text()) | {"model_type": "gpt9"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["check-model", str(tmp_path)]) == 2
    assert "gpt9" in capsys.readouterr().err


def test_a_changed_bit_of_an_export_is_found(tmp_path: Path) -> None:
    tensors = load_file(STUDENT / "model.safetensors")
    name = sorted(tensors)[-1]
    save_file({key: tensor.float() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    text, agrees = check_model._exported(read_model(STUDENT), tmp_path, "one tensor rank")
    assert agrees and f"{len(tensors)} tensors, 0 differ" in text
    changed = tensors | {name: tensors[name].clone()}
    changed[name].view(torch.int16).flatten()[0] ^= 1
    save_file(changed, tmp_path / "model.safetensors")
    text, agrees = check_model._exported(read_model(STUDENT), tmp_path, "one tensor rank")
    assert not agrees and f"1 differ ({name})" in text


def test_the_largest_difference_decides(tmp_path: Path) -> None:
    wanted = [np.array([-1.0, -2.0], np.float32), np.array([-0.5], np.float32)]
    np.savez(tmp_path / "logprobs.npz", **{"0": wanted[0], "1": wanted[1] + np.float32(1e-3)})
    text, agrees = check_model._compared("engine", tmp_path, wanted)
    assert not agrees and "1.0e-03" in text
    np.savez(tmp_path / "logprobs.npz", **{"0": wanted[0], "1": wanted[1]})
    assert check_model._compared("engine", tmp_path, wanted)[1]


def test_in_half_precision_the_mean_distance_is_compared_with_that_of_transformers(tmp_path: Path) -> None:
    wanted = [np.array([-1.0, -2.0], np.float32), np.array([-0.5], np.float32)]
    rounded = [values + np.float32(1e-2) for values in wanted]
    for distance, agrees in ((2.9e-2, True), (3.1e-2, False)):
        np.savez(tmp_path / "logprobs.npz", **{str(n): values - distance for n, values in enumerate(wanted)})
        text, found = check_model._compared_in_half("vLLM", tmp_path, wanted, rounded)
        assert found is agrees and "bound 3.0e-02" in text


@pytest.mark.slow
@pytest.mark.nightly
def test_a_model_agrees_on_one_and_two_ranks_and_in_vllm(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", str(STUDENT)]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("ok", "FAIL"))]
    assert len(lines) == 6 and all(line.startswith("ok") for line in lines)


@pytest.mark.slow
@pytest.mark.nightly
def test_vllms_distance_of_a_hybrid_has_a_bound_from_bf16(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The engine on one rank and on two agrees in f32."""
    assert main(["check-model", save_model(make_hybrid(seed=0), tmp_path)]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("ok", "FAIL"))]
    assert len(lines) == 6 and lines[-1].startswith("ok   vLLM in bf16: ")
