"""Seconds of a weight sync over a stated wire, against hand-counted bytes, devices and hosts."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from roll_opd.commands.main import main

MODELS = Path(__file__).parents[3] / "examples/demo/models"
LORA = ['+student_train.model_args.lora_target="q_proj,down_proj"', "+student_train.model_args.lora_rank=4"]
NODES = ["num_nodes=3", "num_gpus_per_node=2"]
ON_TWO = "student_train.device_mapping=[0,1]"
SPLIT = ["student_train.strategy_args.strategy_config={tensor_model_parallel_size: 2}"]


def engines_on(*devices: int) -> str:
    return f"student_infer.device_mapping=[{','.join(map(str, devices))}]"


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    arguments = ["examples/demo/onpolicy_distill.yaml", *NODES, ON_TWO, *SPLIT, *more]
    assert main(["plan", *arguments, "--json", "--wire", "10"]) == 0
    return dict(json.loads(capsys.readouterr().out)["weight_sync"])


def test_parts_are_bytes_times_passes_over_the_wire(capsys: pytest.CaptureFixture[str]) -> None:
    with safe_open(MODELS / "student/model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    whole = 4 * sum(int(shape[0]) * (int(shape[1]) if len(shape) > 1 else 1) for shape in shapes.values())
    adapted = [shape for name, shape in shapes.items() if "q_proj" in name or "down_proj" in name]
    adapter = 4 * 4 * sum(rows + columns for rows, columns in adapted)
    cases = [  # arguments; bytes; ranks over which they are split; times that they go to engines
        ([engines_on(0, 1)], whole, 2, 0),  # CUDA IPC
        ([engines_on(2, 3, 4, 5)], whole, 2, 1),  # NCCL
        ([engines_on(0, 1, 2, 3)], whole, 2, 1),  # shared memory: one other host
        ([engines_on(0, 1, 2, 3, 4, 5)], whole, 2, 2),
        ([engines_on(2, 3, 4, 5), "weight_sync=shared_memory"], whole, 2, 2),
        ([engines_on(2, 3, 4, 5), *LORA, "lora_sync=adapter"], adapter, 2, 2),
    ]
    for more, size, ranks, times in cases:
        found = planned(capsys, *more)
        assert found["bytes"] == size, more
        wanted = [size * (1 - 1 / ranks) / 1e10, size * times / 1e10]
        assert list(found["seconds"].values()) == pytest.approx(wanted), more


@pytest.mark.parametrize("rate", ["0", "-1", "fast", "nan", "inf"])
def test_a_rate_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], rate: str) -> None:
    assert main(["plan", "examples/demo/onpolicy_distill.yaml", f"--wire={rate}"]) == 2
    error = capsys.readouterr().err
    assert "--wire" in error and rate in error
