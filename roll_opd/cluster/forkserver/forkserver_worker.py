"""Replacement for Ray's program `setup_worker.py`. It starts a Ray worker as a fork of the fork server.

This file imports only the standard library, so that it starts in 0.1 s; see `forkserver_start`.
"""

import atexit
import json
import os
import runpy
import sys
from multiprocessing import context, forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

# environment variables: name of the server's abstract sockets; kind of server process that a worker is forked from
ADDRESS, KIND = "ROLL_OPD_FORKSERVER", "ROLL_OPD_FORKSERVER_KIND"
CONTEXT = "--serialized-runtime-env-context="
RAY_PROGRAMS = "/ray/_private/workers/"

# private objects of the standard library
_SERVER: Any = forkserver._forkserver
_TRACKER: Any = resource_tracker._resource_tracker
_CONTEXTS: Any = vars(context)["_concrete_contexts"]


def address_of(server: str, kind: str) -> str:
    """Return the name of the abstract socket of the server process `kind`."""
    return f"{server}-{kind}"


def connect(address: str) -> None:
    """Connect this process to the fork server at `address`."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    _TRACKER._fd = nowhere  # this process has no tracked resources
    _SERVER._forkserver_address = "\0" + address
    _SERVER._forkserver_alive_fd = nowhere  # the server's lifetime is the driver's, not this process's
    _SERVER.ensure_running = resource_tracker.ensure_running  # does not start another server


class ForkedProcess(ForkServerProcess):
    """A fork of the server. It gets the environment and the output of the process that starts it."""

    def __reduce__(self) -> tuple[Any, ...]:
        output, errors = (reduction.DupFd(number) for number in (1, 2))
        return _set_up_fork, (type(self), dict(os.environ), output, errors), self.__dict__

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        """Start the fork, without importing Ray's worker program as `__main__`.

        This import takes 0.5 s and is not needed.
        """
        main = sys.modules["__main__"]
        program = getattr(main, "__file__", None)
        if program and RAY_PROGRAMS in program:
            main.__file__ = None
        try:
            return ForkServerProcess._Popen(process_obj)
        finally:
            if program:
                main.__file__ = program


class ForkedContext(ForkServerContext):
    """Replacement for the context `spawn` of `multiprocessing`."""

    _name = "spawn"
    Process = ForkedProcess


def _set_up_fork(kind: type[ForkedProcess], environment: dict[str, str], output: Any, errors: Any) -> ForkedProcess:
    """Give this fork the environment, the number of threads and the output of a new process.

    This runs before the fork's task is unpickled.
    """
    import tempfile

    import torch

    from roll_opd.cluster.forkserver.forkserver_main import ENVIRONMENT

    for name in ENVIRONMENT.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # read by torch at import
    tempfile.tempdir = None  # cached from TMPDIR
    torch.set_num_threads(int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0)))
    os.dup2(output.detach(), 1)
    os.dup2(errors.detach(), 2)
    return kind.__new__(kind)


def fork_instead_of_spawning() -> None:
    """Make libraries in this process start children as forks of the server.

    The forks replace the start method `spawn`. This process must be connected to the server.
    """
    _CONTEXTS["spawn"] = ForkedContext()


def _run_program(arguments: list[str]) -> None:
    """Run a Python program as the interpreter would."""
    from roll_opd.cluster.forkserver import forkserver_worker  # not the copy of the module in `__main__`
    from roll_opd.cluster.forkserver.forkserver_main import PATH

    os.setpgid(0, 0)  # Ray kills a worker with its process group
    sys.path[:] = [os.path.dirname(arguments[0]), *PATH]
    sys.argv = arguments
    forkserver_worker.connect(address_of(os.environ[ADDRESS], os.environ[KIND]))
    _TRACKER._fd = None  # so that this process starts a tracker
    forkserver_worker.fork_instead_of_spawning()
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _setup() -> None:
    """Start the worker as a fork of the server.

    If the worker must start without preloaded libraries, run Ray's `setup_worker.py` instead.
    """
    program, *arguments = sys.argv[1:]
    context = next((each for each in arguments if each.startswith(CONTEXT)), CONTEXT + "{}")
    variables = json.loads(context.removeprefix(CONTEXT)).get("env_vars", {})
    known = [each for each in arguments if not each.startswith((CONTEXT, "--language="))]
    process = ForkedProcess(target=_run_program, args=([program, *known],))
    if KIND not in variables or not _is_started(process, variables):
        cold = os.path.join(os.path.dirname(program), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, cold, *sys.argv[1:]])
    process.join()
    sys.exit(process.exitcode)


def _is_started(process: ForkedProcess, variables: dict[str, str]) -> bool:
    """Start `process` with `variables` in its environment. If the server has ended, return False."""
    connect(address_of(os.environ[ADDRESS], variables[KIND]))
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
