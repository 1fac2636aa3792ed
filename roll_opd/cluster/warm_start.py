"""Processes that begin warm: one imports what a run's processes need, and they are forks of it.

torch, Megatron and vLLM take 8 s of CPU and more to import, and a run on one machine has five processes or more that
need them. A warm server (Python's own `multiprocessing.forkserver`) imports them once, while the driver reads its data
and starts Ray: in two processes, of which one has imported Megatron before the other has vLLM. Ray then starts
`warm_worker` in place of the interpreter: it asks one of them for a fork that runs what the interpreter would have run.
The engine core, which vLLM would spawn, is a fork of the one that its client is of.

Only where there is no GPU: a process that has touched CUDA cannot be forked, and imports are nothing beside loading
such models.
"""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from roll_opd.cluster.preloaded import ANY_ENGINE, EAGER_ENGINES, ENGINES, MEGATRON
from roll_opd.cluster.ray_environment import prepare_environment
from roll_opd.cluster.warm_worker import ADDRESS, WARM, address_of
from roll_opd.failures import DEBUG
from roll_opd.hardware import has_gpu_driver
from roll_opd.plan import RunPlan

_SERVE = (
    "import sys; sys.path[:] = {path!r}\n"
    "from roll_opd.cluster.preloaded import follow, preload_and_serve\n"
    "follow({driver}); preload_and_serve(sys.stdin, {listeners!r}, {alive})"
)


class WarmServer:
    """The server as the driver sees it: nothing where there are GPUs, or where the cluster is another's."""

    def __init__(self, process: "subprocess.Popen[bytes] | None") -> None:
        self._process = process

    def serve(self, plan: RunPlan) -> None:
        """Have the server import what the processes of `plan` need."""
        self.import_for(wanted_by(plan))

    def import_for(self, wanted: str | None) -> None:
        """Have the server import what is `wanted_by` a plan; where that is None, all processes begin cold."""
        if wanted is None:
            os.environ.pop(ADDRESS, None)
        if self._process is None or self._process.stdin is None:
            return
        with suppress(BrokenPipeError), self._process.stdin as told:  # broken: it has ended
            told.write((wanted or "").encode())


def wanted_by(plan: RunPlan) -> str | None:
    """Return what the processes of `plan` need besides Megatron, as `WarmServer.import_for` takes it.

    None: variables that the plan or a role sets (system_envs) may be read while libraries are imported.
    """
    of_roles = [role.env for role in plan.megatron_roles().values()]
    of_roles += [role.env for role in plan.inference_roles().values()]
    if plan.env or any(of_roles):
        return None
    engines = plan.inference_roles().values()
    eager = all(role.engine_args.get("enforce_eager", True) for role in engines)
    return (EAGER_ENGINES if eager else ANY_ENGINE) if engines else ""


@contextmanager
def warm_server() -> Iterator[WarmServer]:
    """Have a server import beside the block what a run's processes need.

    It ends with this process, however that ends.
    """
    outer = os.environ.pop(ADDRESS, None)  # of a run that this one is started from
    try:
        if os.environ.get("RAY_ADDRESS") or has_gpu_driver():
            yield WarmServer(None)
        else:
            with _started() as server:
                yield server
    finally:
        os.environ |= {} if outer is None else {ADDRESS: outer}


@contextmanager
def _started() -> Iterator[WarmServer]:
    prepare_environment()
    address = f"roll_opd-{secrets.token_hex(16)}"
    with ExitStack() as stack:
        sockets = {kind: stack.enter_context(socket.socket(socket.AF_UNIX)) for kind in (MEGATRON, ENGINES)}
        for kind, listener in sockets.items():
            listener.bind("\0" + address_of(address, kind))  # of no file, which would stay where this process is killed
            listener.listen()
        listeners = {kind: listener.fileno() for kind, listener in sockets.items()}
        alive_r, alive_w = os.pipe()
        said = None if DEBUG in os.environ else subprocess.DEVNULL
        facts = {"path": sys.path, "driver": os.getpid(), "listeners": listeners, "alive": alive_r}
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVE.format(**facts)],
            # of libraries that have read it for good, before a worker is forked; torch has not
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=(*listeners.values(), alive_r),
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
        )
        os.close(alive_r)
        stack.close()  # of the listeners: who asks a server that has died is to know at once
        os.environ[ADDRESS] = address
        try:
            yield WarmServer(server)
        finally:
            os.environ.pop(ADDRESS, None)
            os.close(alive_w)
            server.kill()  # it may still import; its fork follows it
            server.wait()


def is_open() -> bool:
    """Whether there is a server, so that all workers begin warm."""
    return ADDRESS in os.environ


def variables(kind: str = MEGATRON) -> dict[str, str]:
    """Return what a worker's environment needs for it to begin as a fork of `kind`: nothing where no server is."""
    return {WARM: kind} if is_open() else {}
