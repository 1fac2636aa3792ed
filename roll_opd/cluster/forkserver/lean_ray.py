"""Start Ray for one run, without the processes that a run never uses."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import ray_constants, services
from ray._private.node import Node

from roll_opd.cluster.forkserver import forkserver_start, forkserver_worker, stub_dashboard_agent

# methods of Node that start the autoscaler, and the dashboard server (for which Ray waits even without a dashboard)
UNUSED = ("start_monitor", "start_api_server")
LOGS = "start_log_monitor"  # sends the workers' output to the driver
SETUP = "SETUP_WORKER_FILENAME"  # Ray joins this name to a directory, which does not change an absolute path
PROGRAM = "_build_python_executable_command_memory_profileable"  # method of services that returns a program's command
MAX_CONCURRENT_FORKS = 64
AGENT = "dashboard_agent"  # component name passed to PROGRAM


@contextmanager
def lean(*, shows_logs: bool) -> Iterator[None]:
    """Make Ray start fewer processes inside the block.

    Ray does not start the dashboard agent and the processes in `UNUSED`. Its workers are forks of the fork server. The
    patched names of Ray are private. If a Ray release lacks one of them, that part of Ray starts as usual.
    """
    changed: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        if hasattr(owner, name):
            changed.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    for name in (*UNUSED, *(() if shows_logs else (LOGS,))):
        change(Node, name, _nothing())
    setup = Path(ray_constants.__file__).parent / "workers" / getattr(ray_constants, SETUP, "")
    if forkserver_start.is_open() and setup.is_file():
        # by default one worker per core starts at a time, and forked workers would wait for their turn
        os.environ.setdefault(
            "RAY_worker_maximum_startup_concurrency", str(max(MAX_CONCURRENT_FORKS, os.cpu_count() or 1))
        )
        change(ray_constants, SETUP, str(Path(forkserver_worker.__file__).resolve()))
    change(services, PROGRAM, _without_agent(getattr(services, PROGRAM, None)))
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def _nothing() -> Callable[..., None]:
    def start(node: Node, **_: Any) -> None:
        node._webui_url = ""

    return start


def _without_agent(build: Any) -> Callable[..., list[str]]:
    """Wrap the function `PROGRAM`, which builds the command of a Ray program.

    The command of the dashboard agent is replaced by the command of `stub_dashboard_agent`.
    """

    def command(component: str, *args: Any, **options: Any) -> list[str]:
        if component == AGENT:
            return [sys.executable, "-I", "-S", str(Path(stub_dashboard_agent.__file__).resolve())]
        return build(component, *args, **options)

    return command
