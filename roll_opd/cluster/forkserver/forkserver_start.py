"""Start a fork server, which imports the libraries of a run only once. The workers of the run are forks of the server.

Importing torch, Megatron and vLLM takes at least 8 s of CPU time, and a run on one machine has at least five processes
that need these libraries. The fork server (Python's `multiprocessing.forkserver`) has two processes, one for Megatron's
roles and one for engines. Each of them imports its libraries once, while the driver reads its data and starts Ray.

Ray then starts `forkserver_worker` in place of the Python interpreter. `forkserver_worker` requests a fork, and the
fork runs the worker's program. A vLLM engine core and its client are forks of the same server process.

Some environment variables are read when libraries are imported (`read_at_import`). If a run sets such variables, the
server is restarted with them, which takes one or two seconds.

The server is used on machines with NVIDIA GPUs as well. It does not initialise CUDA, and it refuses requests if an
import has initialised CUDA (see `forkserver_main`).
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from roll_opd.base.failures import DEBUG
from roll_opd.base.hardware import has_gpu_driver, has_nvidia_driver
from roll_opd.cluster.forkserver.forkserver_main import ANY_ENGINE, EAGER_ENGINES, ENGINES, GPU_ENGINES, MEGATRON
from roll_opd.cluster.forkserver.forkserver_worker import ADDRESS, KIND, address_of
from roll_opd.cluster.ray_environment import prepare_environment
from roll_opd.config.plan import RunPlan

SERVED = "ROLL_OPD_FORKSERVER_ENV"  # the system_envs of the server's processes, as JSON
PRELOAD = "ROLL_OPD_PRELOAD"  # set by the user; 0: no fork server
_SERVE = (
    "import sys; sys.path[:] = {path!r}\n"
    "from roll_opd.cluster.forkserver.forkserver_main import exit_with_parent, preload_and_serve\n"
    "exit_with_parent({driver}); preload_and_serve(sys.stdin, {listeners!r}, {alive})"
)


class ForkServer:
    """The driver's handle of the fork server. If `may_fork` is false, the handle does nothing."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._alive: int | None = None  # end of a pipe; closing it ends the server's forks

    def serve(self, plan: RunPlan, say: Callable[[str], object] = print) -> None:
        """Import the modules that the processes of `plan` need.

        For each role that must start without preloaded libraries, print a message with `say`.
        """
        if self._process is None:
            return
        wanted = wanted_by(plan)
        for role, names in cold_roles(plan, wanted["variables"]).items():
            keys = " and ".join(f"system_envs.{name}" for name in names)
            say(
                f"{role} starts without preloaded libraries (about 20 s slower), because {keys} is read at import and"
                " differs between roles; set one value in the system_envs of the whole run"
            )
        self.import_for(wanted)

    def import_for(self, wanted: Mapping[str, Any]) -> None:
        """Import the modules of a request (see `wanted_by`), with the request's variables in the environment."""
        if self._process is None:
            return
        from_start = wanted["variables"][MEGATRON]
        if any(os.environ.get(name) != value for name, value in from_start.items()):
            self.end()
            self.begin(from_start)
        os.environ[SERVED] = json.dumps(wanted["variables"])
        assert self._process and self._process.stdin
        with suppress(BrokenPipeError), self._process.stdin as requests:  # broken: the server has ended
            requests.write(
                json.dumps({"engines": wanted["engines"], "variables": wanted["variables"][ENGINES]}).encode()
            )

    def begin(self, variables: Mapping[str, str]) -> None:
        """Start the server with `variables` in its environment."""
        prepare_environment()
        address = f"roll_opd-{secrets.token_hex(16)}"
        with ExitStack() as stack:
            sockets = {kind: stack.enter_context(socket.socket(socket.AF_UNIX)) for kind in (MEGATRON, ENGINES)}
            for kind, listener in sockets.items():
                listener.bind(
                    "\0" + address_of(address, kind)
                )  # abstract socket: no file is left if this process is killed
                listener.listen()
            listeners = {kind: listener.fileno() for kind, listener in sockets.items()}
            alive, self._alive = os.pipe()
            output = None if DEBUG in os.environ else subprocess.DEVNULL
            path = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
            facts = {"path": path, "driver": os.getpid(), "listeners": listeners, "alive": alive}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE.format(**facts)],
                # libraries read OMP_NUM_THREADS once, at import; torch rereads it in the worker
                env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
                pass_fds=(*listeners.values(), alive),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # not interrupted by Ctrl-C in the terminal
            )
            os.close(alive)  # the listeners too: requests to a dead server then fail immediately
        os.environ[ADDRESS] = address

    def end(self) -> None:
        """Stop the server."""
        for name in (ADDRESS, SERVED):
            os.environ.pop(name, None)
        if self._alive is not None:
            os.close(self._alive)
        if self._process:
            self._process.kill()  # it may still be importing; its fork is killed with it
            self._process.wait()
            if self._process.stdin:
                self._process.stdin.close()
        self._process = self._alive = None


def wanted_by(plan: RunPlan) -> dict[str, Any]:
    """Return a request for `ForkServer.import_for`.

    It states which parts of vLLM to import, and which variables each server process needs.
    """
    engines = plan.inference_roles().values()
    eager = all(role.engine_args.get("enforce_eager", True) for role in engines)
    kind = GPU_ENGINES if has_gpu_driver() else EAGER_ENGINES if eager else ANY_ENGINE
    of_vllm = kind if engines else ""
    return {"engines": of_vllm, "variables": of_servers(plan)}


def may_fork() -> bool:
    """Return whether workers may be forks.

    Workers are not forks in three cases: the driver joins a running Ray cluster, the user has disabled the fork server,
    or the GPU driver is not NVIDIA's driver for Linux. With any other driver, the server cannot check whether a process
    has initialised its devices.
    """
    can_tell = not has_gpu_driver() or has_nvidia_driver()
    return can_tell and not os.environ.get("RAY_ADDRESS") and os.environ.get(PRELOAD) != "0"


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Run a fork server inside the block. The server imports libraries in the background.

    The server ends when this process ends, even if this process is killed with SIGKILL.
    """
    outer = {name: os.environ.pop(name) for name in (ADDRESS, SERVED) if name in os.environ}  # of an enclosing run
    server = ForkServer()
    try:
        if may_fork():
            server.begin({})
        yield server
    finally:
        server.end()
        os.environ |= outer


def is_open() -> bool:
    """Return whether a fork server of this process is running."""
    return ADDRESS in os.environ


def variables(kind: str, system_envs: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that make a worker start as a fork of the server process `kind`.

    If the worker must start without preloaded libraries, the result is empty.

    Args:
        kind: MEGATRON or ENGINES.
        system_envs: variables that are set for the run and for the worker's role.
    """
    served = json.loads(os.environ.get(SERVED, "{}"))
    return {KIND: kind} if is_open() and needed(kind, system_envs) == served.get(kind, {}) else {}


# Prefixes of variables that no import of the server reads: communication, Ray (imported by the forks), trackers
# (imported by the driver), kernels (chosen by each rank).
READ_AT_USE = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "RAY_", "MASTER_"),
    *("WANDB_", "SWANLAB_", "MLFLOW_", "TOKENIZERS_PARALLELISM"),
    *("ROLL_OPD_FLASH_ATTENTION", "ROLL_OPD_TRANSFORMER_ENGINE"),
)
APPLIED = ("OMP_NUM_THREADS", "TMPDIR")  # set by `forkserver_worker` in the fork
VLLM_PREFIX = "VLLM_"  # read when vLLM is imported, only in the engines' server


def read_at_import(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the given variables that must be set when the server starts."""
    return {
        name: str(value)
        for name, value in variables.items()
        if not name.startswith((*READ_AT_USE, *APPLIED, VLLM_PREFIX))
    }


def needed(kind: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the given variables that the server process `kind` must set before it imports libraries.

    A fork of the server then has the same settings as a new process with the given variables.
    """
    of_vllm = {name: str(value) for name, value in variables.items() if name.startswith(VLLM_PREFIX)}
    return read_at_import(variables) | (of_vllm if kind == ENGINES else {})


def of_servers(plan: RunPlan) -> dict[str, dict[str, str]]:
    """Return the variables that each server process (Megatron, engines) must set before it imports libraries.

    Both processes set the variables that have the same value in all roles. The process of the engines also sets vLLM's
    variables that have the same value in all engines.
    """
    megatron, engines = ([role.env for role in roles.values()] for roles in (plan.megatron_roles(), _engines(plan)))
    from_start = _shared([read_at_import({**plan.env, **env}) for env in (*megatron, *engines)])
    of_vllm = _shared([needed(ENGINES, {**plan.env, **env}) for env in engines])
    later = {name: value for name, value in of_vllm.items() if name.startswith(VLLM_PREFIX)}
    return {MEGATRON: from_start, ENGINES: from_start | later}


def cold_roles(plan: RunPlan, served: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return a dict from each role that starts without preloaded libraries to a list of variables.

    The role cannot use the server, because the server has other values for these variables.
    """
    roles = [(name, MEGATRON, role.env) for name, role in plan.megatron_roles().items()]
    roles += [(name, ENGINES, role.env) for name, role in _engines(plan).items()]
    wanted = {name: (needed(kind, {**plan.env, **env}), served[kind]) for name, kind, env in roles}
    return {
        role: sorted({name for name, _ in own.items() ^ has.items()})
        for role, (own, has) in wanted.items()
        if own != has
    }


def _engines(plan: RunPlan) -> Mapping[str, Any]:
    return plan.inference_roles()


def _shared(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    if not environments:
        return {}
    return dict(set.intersection(*(set(each.items()) for each in environments)))
