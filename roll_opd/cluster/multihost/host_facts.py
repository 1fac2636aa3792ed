"""Collect facts about a host, and compare them with the facts of host 0.

The facts are versions, GPUs, model files and whether the host shares a directory with host 0.
"""

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
    """Return the versions that must be equal on all hosts.

    The version of this package includes a hash of its files.
    """
    package = Path(roll_opd.__file__).parent
    files = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        files.update(str(path.relative_to(package)).encode() + path.read_bytes())
    found = {"python": platform.python_version(), "roll_opd": f"{roll_opd.__version__} ({files.hexdigest()[:8]})"}
    return found | {name: _version(name) for name in PACKAGES}


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that processes on this host can use. CUDA is not loaded."""
    present = len([name for name in os.listdir("/dev") if name.removeprefix("nvidia").isdecimal()])
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if allowed is None else min(present, len([name for name in allowed.split(",") if name.strip()]))


def model_files(path: str) -> dict[str, int]:
    """Return a dict from the name of each model file in a directory to its size in bytes.

    Only files that are read when the model is loaded are in the dict. If there is no config.json, the result is empty.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        return {}
    return {file.name: file.stat().st_size for file in directory.iterdir() if file.suffix in (".json", ".safetensors")}


def look(models: Sequence[str], directory: str | None, nonce: str) -> dict[str, Any]:
    """Return the facts for the check of files: this host's model files, and its answer to host 0.

    Host 0 has created the file `nonce` in `directory`. The answer is the name of a file that this host creates next to
    it.

    Args:
        models: directories of the models.
        directory: directory that all hosts must share; None: this is not checked.
    """
    answer = _answer(Path(directory), nonce) if directory else ""
    return {"models": {path: model_files(path) for path in models}, "answer": answer}


def _answer(directory: Path, nonce: str) -> str:
    """Create a file next to the file `nonce`; return the name of the new file.

    Host 0 finds the new file if both hosts share `directory`. If `nonce` is missing, or if `directory` is not writable,
    return "".
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
    """Return the differences between a host and host 0, as phrases that follow the host's name.

    Args:
        own: facts of host 0.
        other: facts of the host.
        devices: number of GPUs that each host needs.
    """
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
    """Return the problems with the model files of a host, as phrases that follow the host's name.

    A file is a problem if it is missing, or if its size differs from the size on host 0.

    Args:
        own: model files of host 0.
        other: model files of the host.
    """
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
