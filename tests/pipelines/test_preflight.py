"""Settings that do not fit the machine or the checkpoint are refused before anything starts."""

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from runs import REPOSITORY
from states import write_state

from roll_opd.base import hardware, installed
from roll_opd.base.frozen import FrozenDict
from roll_opd.base.torch_imports import COMPANIONS
from roll_opd.commands import run as launcher
from roll_opd.config.plan import LoraPlan, RunPlan
from roll_opd.inference import cpu_attention
from roll_opd.inference.engine_arguments import CPU_BLOCK_MULTIPLE
from roll_opd.pipelines import check_machine
from roll_opd.pipelines.check_machine import machine_problems, other_blocks
from roll_opd.pipelines.checkpoints import Checkpoint
from roll_opd.pipelines.start_checks import (
    checkpoint_problems,
    cluster_problems,
    emulated_bf16,
    package_problems,
    preflight,
)
from roll_opd.planner.load_plan import load_plan
from roll_opd.tracking.run_directory import STATE_FILE

STUDENT = REPOSITORY / "examples" / "demo" / "models" / "student"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    return load_plan("demo", "onpolicy_distill", [f"output_dir={tmp_path}"], pure=True)


def _student(path: Path, **config: int) -> Path:
    shutil.copytree(STUDENT, path)
    values = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(values))
    return path


def test_more_devices_than_gpus(plan: RunPlan) -> None:
    assert machine_problems(plan, gpus=2) == []
    (text,) = machine_problems(replace(plan, devices_per_node=8), gpus=2)
    assert text == "num_gpus_per_node: 8 is more than the 2 GPUs of this machine; lower it"


def test_heads_that_cpus_cannot_compute(plan: RunPlan, tmp_path: Path) -> None:
    path = _student(tmp_path / "small", head_dim=16)
    small = replace(plan, rollout=replace(plan.rollout, model=replace(plan.rollout.model, path=str(path))))
    (text,) = machine_problems(small, gpus=0)
    assert "heads of size 16" in text and "use a model" in text
    assert machine_problems(small, gpus=2) == machine_problems(plan, gpus=0) == []


def test_latent_vectors_that_cpus_cannot_compute(plan: RunPlan, tmp_path: Path) -> None:
    widths = {"kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    path = _student(tmp_path / "latent", model_type="deepseek_v3", **widths)
    latent = replace(plan, rollout=replace(plan.rollout, model=replace(plan.rollout.model, path=str(path))))
    (text,) = machine_problems(latent, gpus=0)
    assert "576" in text and "has 32" in text
    assert machine_problems(latent, gpus=2) == []


def test_bf16_without_instructions_for_it(tmp_path: Path) -> None:
    keys = [f"{role}.model_args.dtype=bf16" for role in ("student_train", "teacher")]
    rounded = load_plan("demo", "onpolicy_distill", [f"output_dir={tmp_path}", *keys], pure=True)
    warning = emulated_bf16(rounded, {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False, "avx2": True})
    assert warning and warning.startswith("student_train, teacher: model_args.dtype is bf16") and "fp32" in warning
    assert emulated_bf16(rounded, {"amx_bf16": False, "avx512_bf16": True}) is None


def test_f32_needs_no_instructions(plan: RunPlan) -> None:
    assert emulated_bf16(plan, {}) is None


def test_a_cluster_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert cluster_problems(address) == cluster_problems("auto") == []
    (text,) = cluster_problems(address)
    assert address in text and "Connection refused" in text and "ray start --head" in text


def test_what_engines_cannot_do_on_a_cpu(plan: RunPlan) -> None:
    args = FrozenDict({"block_size": 16, "enable_chunked_prefill": True})
    asked = replace(plan, rollout=replace(plan.rollout, engine_args=args))
    (chunked,) = machine_problems(asked, gpus=0)
    assert "enable_chunked_prefill" in chunked
    said = other_blocks(asked)
    assert said == (
        "student_infer.strategy_args.strategy_config.block_size: 16 is not supported on a CPU; the engine uses 32 here"
    )
    assert other_blocks(plan) is None


def test_block_sizes_are_the_installed_engines() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    (multiple,) = CPUAttentionBackend.get_supported_kernel_block_sizes()
    assert multiple.base == CPU_BLOCK_MULTIPLE


def test_head_sizes_are_the_installed_engines() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    assert cpu_attention.head_sizes(*cpu_attention.PLAIN) == tuple(CPUAttentionBackend.get_supported_head_sizes())
    assert cpu_attention.head_sizes(*cpu_attention.LATENT) == tuple(CPUMLABackend.get_supported_head_sizes())


@pytest.mark.parametrize("size", [16, 24, 48, 320])
def test_the_plan_warns_of_unsupported_head_sizes(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the student's engines and of a teacher that is measured in the student's place."""
    monkeypatch.setattr(hardware, "has_gpu_driver", lambda: False)
    path = _student(tmp_path / "small", head_dim=size)
    refused = f"attention on CPUs cannot compute heads of size {size}"
    for role in ("student_infer", "teacher"):
        plan = load_plan("demo", "onpolicy_distill", [f"output_dir={tmp_path}"], pure=True)
        if role == "teacher":
            worker = replace(plan.teachers[0].source, model=replace(plan.teachers[0].source.model, path=str(path)))
            plan = replace(plan, teachers=(replace(plan.teachers[0], source=worker),))
        else:
            plan = replace(plan, rollout=replace(plan.rollout, model=replace(plan.rollout.model, path=str(path))))
        (text,) = check_machine.warnings_here(plan)
        assert text.startswith(role) and refused in text and str(path) in text
        assert check_machine.warnings_here(replace(plan, device_memory_gb=80.0)) == []  # it is for GPUs elsewhere


def test_a_judges_engine_and_a_cache_too_small_for_a_sequence(plan: RunPlan, tmp_path: Path) -> None:
    args = FrozenDict({"kv_cache_memory_bytes": 1000})
    (text,) = machine_problems(replace(plan, rollout=replace(plan.rollout, engine_args=args)), gpus=0)
    assert "kv_cache_memory_bytes: 1000 bytes are too few for a sequence of 80 tokens" in text
    path = _student(tmp_path / "small", head_dim=16)
    judge = replace(plan.rollout, name="judge", model=replace(plan.rollout.model, path=str(path)))
    judged = replace(plan, rewards=(replace(plan.rewards[0], engine=judge),))
    (text,) = machine_problems(judged, gpus=0)
    assert text.startswith("judge: ") and "heads of size 16" in text


def test_routes_of_an_engine_of_two_ranks(plan: RunPlan) -> None:
    (text,) = machine_problems(replace(plan, rollout=replace(plan.rollout, returns_routes=True, tp=2)), gpus=0)
    assert text.startswith("student_infer: router_replay on CPUs needs engines with one rank")


def test_companions_that_do_not_fit_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip installs them with a torch for CPUs: transformers could import no model, and vLLM no engine."""
    operator = "import torch\ntorch.library.register_fake('torchvision::nms')(lambda boxes, scores, threshold: boxes)\n"
    library = "raise OSError('Could not load this library: _torchaudio.abi3.so')\n"
    for name, code in {
        "torchvision": operator,
        "torchaudio": library,
        "torchcodec": "raise RuntimeError('FFmpeg')",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    assert package_problems() == []
    monkeypatch.syspath_prepend(str(tmp_path))
    with hidden_no_longer_than_this():
        (text,) = package_problems()
        assert find_spec("torchvision") is None and find_spec("torchaudio") is None
    assert "operator torchvision::nms does not exist" in text and "_torchaudio.abi3.so" in text
    assert text.endswith("-m pip uninstall -y torchaudio torchvision")


def test_a_library_of_the_system_that_an_engine_loads_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(installed.SYSTEM_LIBRARIES, "libnone.so.9", "libnone9")
    (text,) = package_problems()
    assert "libnone.so.9" in text and "apt-get install libnone9" in text


@contextmanager
def hidden_no_longer_than_this() -> Iterator[None]:
    try:
        yield
    finally:
        for name in COMPANIONS:
            if name in sys.modules and sys.modules[name] is None:
                del sys.modules[name]


def test_a_checkpoint_of_another_model(plan: RunPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    write_state(checkpoint / "state")
    (checkpoint / STATE_FILE).write_text(json.dumps({"step": 1, "source": {}}))
    _student(checkpoint / "hf")
    assert checkpoint_problems(plan, Checkpoint.read(checkpoint)) == []
    assert plan.student
    adapted = replace(plan, student=replace(plan.student, lora=LoraPlan(("q_proj",), 8, 16.0)))
    (problem,) = checkpoint_problems(adapted, Checkpoint.read(checkpoint))
    assert "has trained all weights, but this run trains LoRA of rank 8 on q_proj" in problem
    shutil.rmtree(checkpoint / "hf")
    _student(checkpoint / "hf", num_hidden_layers=7)
    arguments = ["--config_path", "demo", "--config_name", "onpolicy_distill", f"resume_from_checkpoint={checkpoint}"]
    assert launcher.main("test", pure=True, arguments=[*arguments, f"output_dir={tmp_path / 'out'}"]) == 2
    message = capsys.readouterr().err
    assert "layers: 7 in the checkpoint, 3 in the model" in message and "resume_from_checkpoint: false" in message
    assert not (tmp_path / "out").exists()


def test_what_is_left_out_of_rows_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"instruction": "1+1=", "input": "in words", "output": "2"}) + "\n")
    files = [f"{name}.data_args.file_name={rows}" for name in ("sft_train", "validation")]
    for more, reported in (([], 2), (["query_key=input"], 0)):
        preflight(load_plan("demo", "sft", [*files, f"output_dir={tmp_path}", *more]))
        said = " ".join(capsys.readouterr().err.split())
        assert said.count("warning: 1 row has `input`, which is ignored; query_key: input adds it") == reported
