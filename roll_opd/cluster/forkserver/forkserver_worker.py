"""A worker of Ray's that is a fork of the warm server's: run as a program in the place of Ray's `setup_worker.py`.

This file imports nothing but the standard library, and so starts in 0.1 s; see `warm_start`.
"""

import atexit
import json
import os
import runpy
import sys
from multiprocessing import context, forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

# in the environment: how the server's abstract sockets are named, and of which of its processes a worker is a fork
ADDRESS, WARM = "ROLL_OPD_WARM_SERVER", "ROLL_OPD_WARM"
CONTEXT = "--serialized-runtime-env-context="
RAYS_PROGRAMS = "/ray/_private/workers/"

# of the standard library's inside
_SERVER: Any = forkserver._forkserver
_TRACKER: Any = resource_tracker._resource_tracker
_CONTEXTS: Any = vars(context)["_concrete_contexts"]


def address_of(server: str, kind: str) -> str:
    """Return the name of the abstract socket where a server's process of a kind listens."""
    return f"{server}-{kind}"


def connect(address: str) -> None:
    """Make the process at `address` the one that this process asks for forks."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    _TRACKER._fd = nowhere  # this process has nothing to be tracked
    _SERVER._forkserver_address = "\0" + address
    _SERVER._forkserver_alive_fd = nowhere  # it lives as long as the driver, not as this process
    _SERVER.ensure_running = resource_tracker.ensure_running  # or it would start a server of its own


class WarmProcess(ForkServerProcess):
    """A fork of the server with the environment and the output of the process that starts it."""

    def __reduce__(self) -> tuple[Any, ...]:
        output, errors = (reduction.DupFd(number) for number in (1, 2))
        return _arrive, (type(self), dict(os.environ), output, errors), self.__dict__

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        """Start it. It is not to run a worker's program of Ray's again, which defines nothing and imports for 0.5 s."""
        main = sys.modules["__main__"]
        program = getattr(main, "__file__", None)
        if program and RAYS_PROGRAMS in program:
            main.__file__ = None
        try:
            return ForkServerProcess._Popen(process_obj)
        finally:
            if program:
                main.__file__ = program


class WarmContext(ForkServerContext):
    """In the place of `multiprocessing`'s context `spawn`."""

    _name = "spawn"
    Process = WarmProcess


def _arrive(kind: type[WarmProcess], environment: dict[str, str], output: Any, errors: Any) -> WarmProcess:
    """Make this fork what a new process would be, before anything of its task is unpickled."""
    import tempfile

    import torch

    from roll_opd.cluster.forkserver.forkserver_main import ENVIRONMENT

    for name in ENVIRONMENT.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # torch has read it when it was imported
    tempfile.tempdir = None  # it is looked for once, in TMPDIR
    torch.set_num_threads(int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0)))
    os.dup2(output.detach(), 1)
    os.dup2(errors.detach(), 2)
    return kind.__new__(kind)


def fork_instead_of_spawning() -> None:
    """Have the server, which is connected to, fork what libraries spawn in this process."""
    _CONTEXTS["spawn"] = WarmContext()


def _run_program(arguments: list[str]) -> None:
    """Run a Python program as the interpreter would have."""
    from roll_opd.cluster.forkserver import forkserver_worker  # not this copy of the module
    from roll_opd.cluster.forkserver.forkserver_main import PATH

    os.setpgid(0, 0)  # Ray ends a worker with its whole process group
    sys.path[:] = [os.path.dirname(arguments[0]), *PATH]
    sys.argv = arguments
    forkserver_worker.connect(address_of(os.environ[ADDRESS], os.environ[WARM]))
    _TRACKER._fd = None  # this process starts its own
    forkserver_worker.fork_instead_of_spawning()
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _setup() -> None:
    """Do what Ray's `setup_worker.py` does, and become that program for a worker that is not to begin warm."""
    program, *arguments = sys.argv[1:]
    context = next((each for each in arguments if each.startswith(CONTEXT)), CONTEXT + "{}")
    variables = json.loads(context.removeprefix(CONTEXT)).get("env_vars", {})
    known = [each for each in arguments if not each.startswith((CONTEXT, "--language="))]
    process = WarmProcess(target=_run_program, args=([program, *known],))
    if WARM not in variables or not _is_started(process, variables):
        cold = os.path.join(os.path.dirname(program), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, cold, *sys.argv[1:]])
    process.join()
    sys.exit(process.exitcode)


def _is_started(process: WarmProcess, variables: dict[str, str]) -> bool:
    """Start it with `variables` in its environment. False where the server has ended: it has failed, or was killed."""
    connect(address_of(os.environ[ADDRESS], variables[WARM]))
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        process.start()
    except (OSError, EOFError):
        os.environ.clear()
        os.environ.update(before)
        return False
    return True


if __name__ == "__main__":
    _setup()
