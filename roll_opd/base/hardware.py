"""GPUs and device slots of this machine, for configurations that do not set devices."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

SLOTS = 2  # device slots without GPUs: two processes per role use the cores better than one, and start sooner than more
NVIDIA_FILE = "/dev/nvidiactl"
GPU_FILES = (NVIDIA_FILE, "/dev/dxg", "/dev/kfd")  # NVIDIA, NVIDIA under WSL, AMD
# for deterministic matrix products; cuBLAS reads it once, so every process starts with it
CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # 8 buffers of 4 MiB, cuBLAS's default on Hopper
DRIVER_SECONDS = 20.0  # the first query may initialize the driver


@dataclass(frozen=True)
class Card:
    """Peak rates of a GPU in its data sheet."""

    flops: float  # dense bf16 products, FLOP/s
    bandwidth: float  # of its memory, bytes/s


# NVIDIA's data sheets, by a part of the device's name. The first match counts
CARDS = {
    "H100 PCIe": Card(756e12, 2.0e12),
    "H100 NVL": Card(835e12, 3.9e12),
    "H100": Card(989e12, 3.35e12),
    "H800": Card(989e12, 3.35e12),
    "H200": Card(989e12, 4.8e12),
    "H20": Card(148e12, 4.0e12),
    "B200": Card(2250e12, 8.0e12),
    "A100": Card(312e12, 2.039e12),  # 80 GB, SXM
    "A800": Card(312e12, 2.039e12),
    "L40S": Card(362e12, 0.864e12),
}


def gpus() -> int:
    """Return the number of NVIDIA GPUs that the driver reports."""
    return len(_gpu_mebibytes())


def devices() -> int:
    """Return the number of devices of this node.

    The devices are the node's GPUs. Without GPUs, they are slots that share the node's cores.
    """
    return gpus() or min(SLOTS, len(os.sched_getaffinity(0)))


def gpu_memory_gb() -> float | None:
    """Return the memory in GiB of this machine's smallest NVIDIA GPU; None without an NVIDIA GPU."""
    return min(_gpu_mebibytes(), default=0) / 1024 or None


def engines_are_on_cpus() -> bool:
    """Return whether inference engines run on CPUs. Engines of a joined cluster may be on other machines."""
    return not (has_gpu_driver() or os.environ.get("RAY_ADDRESS"))


def has_gpu_driver() -> bool:
    """Return whether a GPU driver is loaded, even if nvidia-smi is missing or reports no memory."""
    return any(map(os.path.exists, GPU_FILES))


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's driver for Linux is loaded."""
    return os.path.exists(NVIDIA_FILE)


def peak_flops() -> float | None:
    """Return the peak FLOP/s of this machine's first NVIDIA GPU for dense bf16 products; None if it is unknown."""
    names = _queried("name")
    return next((card.flops for part, card in CARDS.items() if names and part in names[0]), None)


def _gpu_mebibytes() -> list[int]:
    """Return the memory of each NVIDIA GPU in MiB. The list is empty if nvidia-smi is missing or finds no GPU."""
    try:
        return [int(line) for line in _queried("memory.total")]
    except ValueError:
        return []


def _queried(field: str) -> list[str]:
    """Return the value of an nvidia-smi field for each GPU. Memory is in MiB.

    The result is empty if nvidia-smi is missing or fails.
    """
    tool = shutil.which("nvidia-smi")
    try:
        return _query(tool, field) if tool else []
    except (OSError, subprocess.SubprocessError):
        return []


@cache  # cached: nvidia-smi takes a second, and planning needs this for every Megatron option
def _query(tool: str, field: str) -> list[str]:
    command = [tool, f"--query-gpu={field}", "--format=csv,noheader,nounits"]  # one line per GPU
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True)
    return done.stdout.splitlines()
