"""What a host says of itself before a run starts, and what is wrong with it."""

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
SEEN_SECONDS = 10.0  # for a network file system to show a new file


def facts() -> dict[str, Any]:
    """Return this host's name, GPUs and versions."""
    return {"name": socket.gethostname(), "gpus": count_gpus(), "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts; of this package also what its files are."""
    package = Path(roll_opd.__file__).parent
    files = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        files.update(str(path.relative_to(package)).encode() + path.read_bytes())
    found = {"python": platform.python_version(), "roll_opd": f"{roll_opd.__version__} ({files.hexdigest()[:8]})"}
    return found | {name: _version(name) for name in PACKAGES}


def count_gpus() -> int:
    """Return how many NVIDIA GPUs processes of this host may use, without loading anything of CUDA's."""
    present = len([name for name in os.listdir("/dev") if name.removeprefix("nvidia").isdecimal()])
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if allowed is None else min(present, len([name for name in allowed.split(",") if name.strip()]))


def model_files(path: str) -> dict[str, int]:
    """Return the files of a model that are loaded, by name in bytes; none where there is no config.json."""
    directory = Path(path)
    if not (directory / "config.json").is_file():
        return {}
    return {file.name: file.stat().st_size for file in directory.iterdir() if file.suffix in (".json", ".safetensors")}


def look(models: Sequence[str], directory: str | None, nonce: str) -> dict[str, Any]:
    """Return what this host has of `models`, and whether it shares `directory`, into which host 0 has put `nonce`."""
    answer = _answer(Path(directory), nonce) if directory else ""
    return {"models": {path: model_files(path) for path in models}, "answer": answer}


def _answer(directory: Path, nonce: str) -> str:
    """Put a file beside the one named `nonce`, and return its name; "" where that is not there, or cannot be done."""
    name = f"{nonce}.{os.urandom(8).hex()}"
    if not appears(directory / nonce):
        return ""
    try:
        (directory / name).touch()
    except OSError:
        return ""
    return name


def appears(path: Path) -> bool:
    """Wait until `path` is there, for a while. Whether it is."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def differences(own: Mapping[str, Any], other: Mapping[str, Any], devices: int) -> list[str]:
    """Return how a host differs from host 0, each as what follows its name. `devices`: that a run needs of each."""
    found = [
        f"has {name} {theirs} and host 0 has {ours}; install the same"
        for name, ours in own["versions"].items()
        if (theirs := other["versions"].get(name, "none")) != ours
    ]
    if bool(own["gpus"]) != bool(other["gpus"]):
        found.append(f"has {other['gpus']} GPUs and host 0 has {own['gpus']}; use hosts that are alike")
    elif other["gpus"] and other["gpus"] < devices:
        found.append(f"has {other['gpus']} GPUs, fewer than num_gpus_per_node {devices}; lower that")
    return found


def model_problems(own: Mapping[str, Mapping[str, int]], other: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return what a host lacks of the models that host 0 has, as `differences` does."""
    found = []
    for path, files in own.items():
        theirs = other.get(path, {})
        if not theirs:
            found.append(f"has no model at {path} (no config.json); put it there, at the same path on every host")
        elif differing := sorted(name for name, size in files.items() if theirs.get(name) != size):
            others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            found.append(f"has another {differing[0]}{others} at {path} than host 0, or none; copy the model again")
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
