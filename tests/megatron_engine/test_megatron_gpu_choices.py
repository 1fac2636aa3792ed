"""Choices for GPUs that can be tested without a GPU; docs/gpu.md lists the others."""

import json
import os
import subprocess
import sys

import pytest
import torch

from roll_opd.cluster.ray_environment import torch_variables
from roll_opd.config.plan import Layout
from roll_opd.megatron.layer_specs import transformer_engine_attends, uses_transformer_engine
from roll_opd.megatron.model_builder import fusions

A100, H100, B200 = (8, 0), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("capability", "has_flash_attention", "deterministic", "attends"),
    [
        (A100, False, False, False),
        (A100, True, False, True),
        (A100, True, True, True),
        (H100, False, False, True),
        (H100, False, True, False),
        (H100, True, True, True),
        (B200, False, False, True),
    ],
)
def test_transformer_engine_attends_where_it_needs_no_square_of_a_packs_length(
    capability: tuple[int, int], has_flash_attention: bool, deterministic: bool, attends: bool
) -> None:
    settings = {"has_flash_attention": has_flash_attention, "deterministic": deterministic}
    assert transformer_engine_attends(capability, **settings) == attends


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_a_gpu_is_chosen_on_a_cpu(dtype: torch.dtype) -> None:
    if torch.cuda.is_available():
        pytest.skip("tests the choices of a machine without a GPU")
    assert not uses_transformer_engine(dtype)
    assert fusions(dtype, Layout()) == {}


ENGINE_OF_NO_FIXED_BITS = """
import json, os, torch
from roll_opd.megatron.parallel import initialize
from roll_opd.config.plan import Layout
before = torch.backends.cuda.cudnn_sdp_enabled()
initialize(Layout(), seed=0, deterministic=False)
print(json.dumps([before, torch.backends.cuda.cudnn_sdp_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"]]))
"""


@pytest.mark.nightly
def test_a_rank_attends_without_cudnn_and_can_be_deterministic_later() -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-c", ENGINE_OF_NO_FIXED_BITS]
    done = subprocess.run(command, env=environment | ranks, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [True, False, ":4096:8"]


def test_processes_of_a_run_start_with_a_workspace_for_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert torch_variables()["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert torch_variables()["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
