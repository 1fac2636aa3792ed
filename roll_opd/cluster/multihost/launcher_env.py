"""Read the rank, the size and the address of a multi-host run from environment variables.

torchrun, srun or mpirun sets these variables.
"""

import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from roll_opd.base.failures import ConfigError

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
