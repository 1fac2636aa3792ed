"""Collect facts about a host (versions, GPUs, model files, shared directory), and compare them with host 0's."""

import hashlib
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import roll_opd

PACKAGES = ("ray", "torch", "vllm", "megatron-core", "transformers", "transformer-engine")
VISIBLE_TIMEOUT_S = 10.0  # seconds for a network file system to show a new file


def facts() -> dict[str, Any]:
    """Return this host's name, GPUs and versions."""
    return {"name": socket.gethostname(), "gpus": count_gpus(), "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts. The version of this package includes a hash of its files."""
    package = Path(roll_opd.__file__).parent
    files = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        files.update(str(path.relative_to(package)).encode() + path.read_bytes())
    found = {"python": platform.python_version(), "roll_opd": f"{roll_opd.__version__} ({files.hexdigest()[:8]})"}
    return found | {name: _version(name) for name in PACKAGES}


def count_gpus() -> int:
    """Return, without loading CUDA, the number of NVIDIA GPUs that processes on this host see."""
    present = len([name for name in os.listdir("/dev") if name.removeprefix("nvidia").isdecimal()])
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if allowed is None else min(present, len([name for name in allowed.split(",") if name.strip()]))


def model_files(path: str) -> dict[str, int]:
    """Return the size in bytes of each model file that is loaded. The result is empty if there is no config.json."""
    directory = Path(path)
    if not (directory / "config.json").is_file():
        return {}
    return {file.name: file.stat().st_size for file in directory.iterdir() if file.suffix in (".json", ".safetensors")}


def look(models: Sequence[str], directory: str | None, nonce: str) -> dict[str, Any]:
    """Return this host's files of `models`, and the name of its reply to host 0's file `nonce` in `directory`."""
    answer = _answer(Path(directory), nonce) if directory else ""
    return {"models": {path: model_files(path) for path in models}, "answer": answer}


def _answer(directory: Path, nonce: str) -> str:
    """Create a file in `directory` next to the file `nonce`, and return the name of the new file.

    Return "" if `nonce` is missing or if `directory` is not writable.
    """
    name = f"{nonce}.{os.urandom(8).hex()}"
    if not wait_for_file(directory / nonce):
        return ""
    try:
        (directory / name).touch()
    except OSError:
        return ""
    return name


def wait_for_file(path: Path) -> bool:
    """Wait at most `VISIBLE_TIMEOUT_S` until `path` exists; return whether it exists."""
    deadline = time.monotonic() + VISIBLE_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def differences(own: Mapping[str, Any], other: Mapping[str, Any], devices: int) -> list[str]:
    """Return how a host differs from host 0, as phrases that follow its name. `devices`: GPUs that a host needs."""
    found = [
        f"has {name} {theirs} and host 0 has {ours}; install the same version on both hosts"
        for name, ours in own["versions"].items()
        if (theirs := other["versions"].get(name, "none")) != ours
    ]
    if bool(own["gpus"]) != bool(other["gpus"]):
        found.append(f"has {other['gpus']} GPUs and host 0 has {own['gpus']}; use hosts of the same kind")
    elif other["gpus"] and other["gpus"] < devices:
        found.append(f"has {other['gpus']} GPUs, fewer than num_gpus_per_node {devices}; lower num_gpus_per_node")
    return found


def model_problems(own: Mapping[str, Mapping[str, int]], other: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return phrases like `differences` for model files that are missing or differ from host 0's."""
    found = []
    for path, files in own.items():
        theirs = other.get(path, {})
        if not theirs:
            found.append(f"has no model at {path} (no config.json); copy the model to this path on every host")
        elif differing := sorted(name for name, size in files.items() if theirs.get(name) != size):
            others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            found.append(f"has a missing or different {differing[0]}{others} in {path}; copy the model from host 0")
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
