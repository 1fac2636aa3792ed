"""Facts about a host, and their comparison with the facts of host 0.

The facts are versions, GPUs, model files and whether the host shares a directory with host 0. Rank, size and address of
the run are read from the environment variables that torchrun, srun or mpirun sets.
"""

import hashlib
import os
import platform
import re
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import roll_opd
from roll_opd.base.failures import ConfigError
from roll_opd.base.installed import version_of

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
    return found | {name: version_of(name) or "none" for name in PACKAGES}


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


DEFAULT_PORT = 29500  # torchrun's MASTER_PORT
MAX_PORT = 2**16 - 1
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")  # prefixes of torchrun's other variables


class LaunchError(ConfigError):
    """The hosts of a multi-host run, or their environment variables, cannot be used.

    `problems` contains one sentence per problem.
    """

    def __str__(self) -> str:
        numbered = (f"  {number}. {text}" for number, text in enumerate(self.problems, 1))
        return "\n".join(["the hosts of the run cannot be used:", *numbered])


@dataclass(frozen=True)
class LaunchedHost:
    """One host of a multi-host run. The driver runs on host 0."""

    rank: int
    size: int
    address: str  # address of host 0
    port: int  # port on which host 0 listens

    def own_address(self) -> str:
        """Return the address of this host on the route to host 0.

        Raises:
            LaunchError: if there is no route to host 0.
        """
        try:
            family, kind, *_, there = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = f"no route to host 0 at {self.address} (MASTER_ADDR): {error.strerror}; set its address"
            raise LaunchError([problem]) from None


def launched(environ: Mapping[str, str]) -> LaunchedHost | None:
    """Return this host's place in a multi-host run; None if the run has only one host.

    Raises:
        LaunchError: if the environment variables cannot be used.
    """
    variable = next((name for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") if name in environ), "")
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        here = _number(environ, "LOCAL_WORLD_SIZE", "1")
        first, how = "", "--nproc_per_node 1"
    elif "SLURM_PROCID" in environ and not _is_of_one_process(environ):
        rank = _number(environ, "SLURM_PROCID")
        size = _number(environ, "SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1"))
        here = max(int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", tasks) or ["1"])
        here = min(here, size)  # the variable may describe the job, not this step
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        first, how = first_node(nodes), "--ntasks-per-node=1"
    elif "OMPI_COMM_WORLD_RANK" in environ:
        rank, size = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
        here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "1")
        first, how = "", "--map-by ppr:1:node"
    else:
        return None
    if size <= 1:
        return None
    if here > 1:
        raise LaunchError(
            [
                f"{here} processes were launched on a host; launch one per host, which starts the others: use {how};"
                f" for a run on this host only, unset {variable}"
            ]
        )
    if environ.get("RAY_ADDRESS"):
        raise LaunchError(
            [
                f"RAY_ADDRESS names a Ray cluster, and {size} hosts were launched, which would start another cluster;"
                " unset RAY_ADDRESS, or launch a single host"
            ]
        )
    address = environ.get("MASTER_ADDR") or first
    if not address:
        raise LaunchError(
            [f"{size} hosts were launched, but MASTER_ADDR is not set; set it to the address of host 0 on every host"]
        )
    port = _number(environ, "MASTER_PORT", str(DEFAULT_PORT)) + 1  # torchrun listens on MASTER_PORT itself
    if port > MAX_PORT:
        raise LaunchError([f"MASTER_PORT is {port - 1}, but the hosts connect to the next port; use a lower port"])
    return LaunchedHost(rank, size, address, port)


def forget(environ: MutableMapping[str, str]) -> None:
    """Remove torchrun's variables from the environment, because libraries in the run's processes would read them."""
    for name in [name for name in environ if name in TORCHRUN_VARIABLES or name.startswith(PREFIXES)]:
        del environ[name]


def first_node(nodes: str) -> str:
    """Return the first name in a Slurm node list. For example, "n[003-006,9],m1" gives n003."""
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def _is_of_one_process(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm has started only this process.

    Slurm starts a single process for the script of an sbatch job, and for a shell (srun --pty).
    """
    return "SLURM_PTY_PORT" in environ or (environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ)


def _number(environ: Mapping[str, str], name: str, otherwise: str = "") -> int:
    text = environ.get(name, otherwise)
    if not text.isdecimal():
        raise LaunchError([f"{name} is {text!r} in the environment; a launcher sets it to a number"])
    return int(text)
