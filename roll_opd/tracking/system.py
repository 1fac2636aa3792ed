"""Throughput and memory metrics of a step. `docs/metrics.md` lists every name."""

from collections.abc import Mapping

import psutil
import torch

from roll_opd.tracking.summary import GENERATED_TOKENS, STEP_SECONDS, STEP_TOKENS

GIB = 2**30


def throughput_metrics(row: Mapping[str, float]) -> dict[str, float]:
    """Return `system/tps` and `system/generate_tps` of a step, if `row` has the tokens and seconds that each needs."""
    rates = {
        "system/tps": (row.get(STEP_TOKENS), row.get(STEP_SECONDS)),
        "system/generate_tps": (row.get(GENERATED_TOKENS), row.get("time/generate")),
    }
    return {name: tokens / seconds for name, (tokens, seconds) in rates.items() if tokens and seconds}


def memory_metrics() -> dict[str, float]:
    """Return `system/memory_gib` of this process and its descendants, and `system/device_memory_gib`.

    The former is resident private memory. The latter is the memory that all processes use on the fullest device; it is
    missing without a GPU.
    """
    here = psutil.Process()
    own = sum(map(_private_bytes, (here, *here.children(recursive=True))))
    return {"system/memory_gib": own / GIB, **_device_memory()}


def _device_memory() -> dict[str, float]:
    try:
        used = [torch.cuda.device_memory_used(number) for number in range(torch.cuda.device_count())]
    except Exception:  # a run must not end because NVML is missing or fails
        return {}
    return {"system/device_memory_gib": max(used) / GIB} if used else {}


def _private_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0  # the process has ended
    return memory.rss - getattr(memory, "shared", 0)  # only Linux reports shared memory
