"""Processes that begin warm: one imports what a run's processes need, and they are forks of it.

torch, Megatron and vLLM take 8 s of CPU and more to import, and a run on one machine has five processes or more that
need them. A warm server (Python's own `multiprocessing.forkserver`) imports them once, while the driver reads its data
and starts Ray: in two processes, of which one has imported Megatron before the other has vLLM. Ray then starts
`warm_worker` in place of the interpreter: it asks one of them for a fork that runs what the interpreter would have run.
vLLM's engine core is a fork of the same server as its client. If a run sets variables that are read at import
(`warm_variables`), the server is restarted with them, which takes a second or two.

Only where there is no GPU: a process that has touched CUDA cannot be forked, and imports are nothing beside loading
such models.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from roll_opd.base.failures import DEBUG
from roll_opd.base.hardware import has_gpu_driver
from roll_opd.cluster.forkserver.forkserver_main import ANY_ENGINE, EAGER_ENGINES, ENGINES, MEGATRON
from roll_opd.cluster.forkserver.forkserver_variables import cold_roles, needed, of_servers
from roll_opd.cluster.forkserver.forkserver_worker import ADDRESS, WARM, address_of
from roll_opd.cluster.ray_environment import prepare_environment
from roll_opd.config.plan import RunPlan

SERVED = "ROLL_OPD_WARM_VARIABLES"  # the system_envs of the server's processes, as JSON
_SERVE = (
    "import sys; sys.path[:] = {path!r}\n"
    "from roll_opd.cluster.forkserver.forkserver_main import follow, preload_and_serve\n"
    "follow({driver}); preload_and_serve(sys.stdin, {listeners!r}, {alive})"
)


class WarmServer:
    """The server as the driver sees it: nothing where there are GPUs, or where the cluster is another's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._alive: int | None = None  # closed, it ends the server's forks

    def serve(self, plan: RunPlan, say: Callable[[str], object] = print) -> None:
        """Import the modules for the processes of `plan`; report roles that start without preloading by `say`."""
        if self._process is None:
            return
        wanted = wanted_by(plan)
        for role, names in cold_roles(plan, wanted["variables"]).items():
            said = " and ".join(f"system_envs.{name}" for name in names)
            say(
                f"{role} starts without preloaded libraries, about 20 s slower: {said} is read at import and differs"
                " between roles; set it in the system_envs of the whole run, with one value"
            )
        self.import_for(wanted)

    def import_for(self, wanted: Mapping[str, Any]) -> None:
        """Import the modules of `wanted_by`, with the variables that are read at import."""
        if self._process is None:
            return
        from_start = wanted["variables"][MEGATRON]
        if any(os.environ.get(name) != value for name, value in from_start.items()):
            self.end()
            self.begin(from_start)
        os.environ[SERVED] = json.dumps(wanted["variables"])
        assert self._process and self._process.stdin
        with suppress(BrokenPipeError), self._process.stdin as told:  # broken: it has ended
            told.write(json.dumps({"engines": wanted["engines"], "variables": wanted["variables"][ENGINES]}).encode())

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
                start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
            )
            os.close(alive)  # with the listeners, so that requests to a dead server fail at once
        os.environ[ADDRESS] = address

    def end(self) -> None:
        """End the server."""
        for name in (ADDRESS, SERVED):
            os.environ.pop(name, None)
        if self._alive is not None:
            os.close(self._alive)
        if self._process:
            self._process.kill()  # it may still import; its fork ends with it
            self._process.wait()
            if self._process.stdin:
                self._process.stdin.close()
        self._process = self._alive = None


def wanted_by(plan: RunPlan) -> dict[str, Any]:
    """Return the argument of `WarmServer.import_for`: the parts of vLLM to import, and both servers' variables."""
    engines = plan.inference_roles().values()
    eager = all(role.engine_args.get("enforce_eager", True) for role in engines)
    of_vllm = (EAGER_ENGINES if eager else ANY_ENGINE) if engines else ""
    return {"engines": of_vllm, "variables": of_servers(plan)}


@contextmanager
def warm_server() -> Iterator[WarmServer]:
    """Have a server import beside the block what a run's processes need.

    It ends with this process, however that ends.
    """
    outer = {name: os.environ.pop(name) for name in (ADDRESS, SERVED) if name in os.environ}  # of a run around this one
    server = WarmServer()
    try:
        if not (os.environ.get("RAY_ADDRESS") or has_gpu_driver()):
            server.begin({})
        yield server
    finally:
        server.end()
        os.environ |= outer


def is_open() -> bool:
    """Whether a server runs, so that workers start with preloaded modules."""
    return ADDRESS in os.environ


def variables(kind: str, system_envs: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that make a worker start as a fork of `kind`; none if it has to start without preloading.

    `system_envs` are the variables that the run and the worker's role set.
    """
    served = json.loads(os.environ.get(SERVED, "{}"))
    return {WARM: kind} if is_open() and needed(kind, system_envs) == served.get(kind, {}) else {}
