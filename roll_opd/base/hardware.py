"""What this machine has to run on; asked only where a configuration does not say."""

import os
import shutil
import subprocess
from functools import cache

SLOTS = 2  # of a machine without GPUs: two processes a role keep its cores busier than one, and start sooner than more
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, the same under WSL, AMD's
# needed for deterministic matrix products; cuBLAS reads it once per process, so every process starts with it
CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # 8 buffers of 4 MiB, cuBLAS's default on Hopper
DRIVER_SECONDS = 20.0  # the first question after a start may wake the driver


def gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine, from its driver."""
    return len(_gpu_mebibytes())


def devices() -> int:
    """Return how many devices a node like this one has: its GPUs; without any, slots that share the cores."""
    return gpus() or min(SLOTS, len(os.sched_getaffinity(0)))


def gpu_memory_gb() -> float | None:
    """Return the GiB of this machine's smallest NVIDIA GPU; None where there is none."""
    return min(_gpu_mebibytes(), default=0) / 1024 or None


def has_gpu_driver() -> bool:
    """Whether there may be GPUs, also where the driver's tool is missing or knows no memory of theirs."""
    return any(map(os.path.exists, GPU_FILES))


def _gpu_mebibytes() -> list[int]:
    """Return the memory of each NVIDIA GPU, in MiB; nothing where the driver's tool is missing or sees none."""
    tool = shutil.which("nvidia-smi")
    try:
        return _asked(tool) if tool else []
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


@cache  # it takes a second, and the same configuration asks for every option of Megatron's
def _asked(tool: str) -> list[int]:
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # MiB, a line each
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True)
    return [int(line) for line in done.stdout.split()]
