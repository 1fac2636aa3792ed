"""Ray for one run on one machine, without the processes that such a run never asks anything."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import ray_constants, services
from ray._private.node import Node

from roll_opd.cluster.forkserver import forkserver_start, forkserver_worker, stub_dashboard_agent

# of Node: the autoscaler; the server of the dashboard, which is waited for even where no dashboard is wanted
NEVER_ASKED = ("start_monitor", "start_api_server")
LOGS = "start_log_monitor"  # what sends the workers' output to the driver
SETUP = "SETUP_WORKER_FILENAME"  # joined to a directory: an absolute path stays what it is
PROGRAM = "_build_python_executable_command_memory_profileable"  # of services: how a Python program of Ray's begins
FORKS_AT_ONCE = 64
AGENT = "dashboard_agent"  # as PROGRAM is told of it


@contextmanager
def lean(*, shows_logs: bool) -> Iterator[None]:
    """Have a Ray that starts inside the block do without them, and without the dashboard's agent.

    It asks `warm_worker` for its workers, if they are to be forks.

    These are names of Ray's own inside: where a release has others, its start is an ordinary one.
    """
    changed: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        if hasattr(owner, name):
            changed.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    for name in (*NEVER_ASKED, *(() if shows_logs else (LOGS,))):
        change(Node, name, _nothing())
    setup = Path(ray_constants.__file__).parent / "workers" / getattr(ray_constants, SETUP, "")
    if forkserver_start.is_open() and setup.is_file():
        # or as many start at once as there are cores, and those whose imports are done wait for others
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(max(FORKS_AT_ONCE, os.cpu_count() or 1)))
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


def _without_agent(begun: Any) -> Callable[..., list[str]]:
    """Return what `PROGRAM` is, but for the dashboard's agent: in its place begins `absent_agent`, with its options."""

    def command(component: str, *args: Any, **options: Any) -> list[str]:
        if component == AGENT:
            return [sys.executable, "-I", "-S", str(Path(stub_dashboard_agent.__file__).resolve())]
        return begun(component, *args, **options)

    return command
