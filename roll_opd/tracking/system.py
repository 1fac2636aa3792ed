"""What a step takes of the machine: tokens a second, and memory. `docs/metrics.md` lists every name."""

from collections.abc import Mapping

import psutil
import torch

from roll_opd.tracking.summary import GENERATED_TOKENS, STEP_SECONDS, STEP_TOKENS

GIB = 2**30


def throughput_metrics(row: Mapping[str, float]) -> dict[str, float]:
    """Return `system/tps` and `system/generate_tps` of a step's other metrics, as far as it has tokens."""
    rates = {
        "system/tps": (row.get(STEP_TOKENS), row.get(STEP_SECONDS)),
        "system/generate_tps": (row.get(GENERATED_TOKENS), row.get("time/generate")),
    }
    return {name: tokens / seconds for name, (tokens, seconds) in rates.items() if tokens and seconds}


def memory_metrics() -> dict[str, float]:
    """Return `system/memory_gib`, of this process and all that it started, and `system/device_memory_gib`.

    The first is what they have resident and share with nobody. The second is of the fullest device, whoever uses it;
    it is missing where there is no GPU.
    """
    here = psutil.Process()
    own = sum(map(_private_bytes, (here, *here.children(recursive=True))))
    return {"system/memory_gib": own / GIB, **_of_devices()}


def _of_devices() -> dict[str, float]:
    try:
        used = [torch.cuda.device_memory_used(number) for number in range(torch.cuda.device_count())]
    except Exception:  # NVML is not there, or does not answer: no reason to end a run
        return {}
    return {"system/device_memory_gib": max(used) / GIB} if used else {}


def _private_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0  # it is gone
    return memory.rss - getattr(memory, "shared", 0)  # Linux alone tells what is shared
