"""Importing the package does not change torch: only a process that runs Megatron on a CPU is patched."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import importlib, json, pkgutil, torch
import roll_opd
from roll_opd.megatron import cpu_port

OWNERS = {"torch": torch, "cuda": torch.cuda, "Tensor": torch.Tensor, "Module": torch.nn.Module}
NAMES = {
    "torch": cpu._CONSTRUCTORS,
    "cuda": ("current_device", "device_count", "set_device", "synchronize", "empty_cache", "Stream", "Event",
             "current_stream", "default_stream", "stream", "manual_seed", "get_rng_state", "set_rng_state",
             "FloatTensor", "HalfTensor", "BFloat16Tensor"),
    "Tensor": ("cuda", "type"),
    "Module": ("cuda",),
}

def changed(before):
    return sorted(key for key, value in before.items() if value is not look(*key.split(".")))

def look(owner, name):
    return getattr(OWNERS[owner], name)

before = {f"{owner}.{name}": look(owner, name) for owner in OWNERS for name in NAMES[owner]}
modules = [m.name for m in pkgutil.walk_packages(roll_opd.__path__, "roll_opd.")]
for name in modules:
    importlib.import_module(name)
imported = changed(before)
cpu_port.install_cpu_port()
print(json.dumps({"modules": modules, "imported": imported, "installed": changed(before), "all": sorted(before)}))
"""


@pytest.mark.nightly
def test_importing_everything_patches_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"roll_opd.megatron.student_engine", "roll_opd.inference.vllm_engine", "roll_opd.commands.main"} <= set(
        found["modules"]
    )
    assert found["imported"] == []
    assert found["installed"] == found["all"]  # the test sees what the port does
