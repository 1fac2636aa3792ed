"""GPUs and device slots of this machine, for configurations that do not set devices."""

import os
import shutil
import subprocess
from functools import cache

SLOTS = 2  # device slots without GPUs: two processes per role use the cores better than one, and start sooner than more
NVIDIA_FILE = "/dev/nvidiactl"
GPU_FILES = (NVIDIA_FILE, "/dev/dxg", "/dev/kfd")  # NVIDIA, NVIDIA under WSL, AMD
# for deterministic matrix products; cuBLAS reads it once, so every process starts with it
CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # 8 buffers of 4 MiB, cuBLAS's default on Hopper
DRIVER_SECONDS = 20.0  # the first query may initialize the driver


def gpus() -> int:
    """Return the number of NVIDIA GPUs that the driver reports."""
    return len(_gpu_mebibytes())


def devices() -> int:
    """Return the number of devices of this node: its GPUs or, without GPUs, the slots that share its cores."""
    return gpus() or min(SLOTS, len(os.sched_getaffinity(0)))


def gpu_memory_gb() -> float | None:
    """Return the memory in GiB of this machine's smallest NVIDIA GPU; None without an NVIDIA GPU."""
    return min(_gpu_mebibytes(), default=0) / 1024 or None


def has_gpu_driver() -> bool:
    """Return whether a GPU driver is loaded, even if nvidia-smi is missing or reports no memory."""
    return any(map(os.path.exists, GPU_FILES))


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's driver for Linux is loaded."""
    return os.path.exists(NVIDIA_FILE)


def _gpu_mebibytes() -> list[int]:
    """Return the memory of each NVIDIA GPU in MiB; empty if nvidia-smi is missing or finds none."""
    tool = shutil.which("nvidia-smi")
    try:
        return _query_memory(tool) if tool else []
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


@cache  # cached: nvidia-smi takes a second, and planning needs this for every Megatron option
def _query_memory(tool: str) -> list[int]:
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # MiB, one line per GPU
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True)
    return [int(line) for line in done.stdout.split()]
