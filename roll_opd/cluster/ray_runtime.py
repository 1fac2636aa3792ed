"""Start Ray for one run and stop it afterwards, or join an existing cluster."""

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private.node import Node
from ray._private.parameter import RayParams

from roll_opd.base.failures import DEBUG, RunError
from roll_opd.cluster.forkserver.lean_ray import lean
from roll_opd.cluster.lost_processes import ClusterError
from roll_opd.cluster.multihost.host_facts import count_gpus
from roll_opd.cluster.multihost.hosts import Hosts
from roll_opd.cluster.process_reaper import guarded
from roll_opd.cluster.ray_environment import prepare_environment, run_temp_directory, use_interface_of
from roll_opd.cluster.startup_progress import StartupProgress

SLOT = "roll_opd_slot"  # resource name of a device on a machine without GPUs
MAX_JOIN_S = 3600.0  # seconds for a host to start its Ray node


@contextmanager
def ray_cluster(
    devices_per_node: int,
    starting: StartupProgress | None = None,
    hosts: Hosts | None = None,
    logs: Path | None = None,
) -> Iterator[None]:
    """Context manager: run Ray for one run, on all `hosts` if there are several.

    If RAY_ADDRESS is set, the run joins that cluster. Otherwise a cluster is started on this machine. The processes and
    the session directory of a started cluster are removed when this process ends, even if SIGKILL ends it. Before that,
    the logs of this machine's processes are copied to `<logs>/ray/<session>`.

    A started cluster offers the machine's GPUs and `devices_per_node` slots. Slots are the devices of machines without
    GPUs.
    """
    starting = starting or StartupProgress()
    prepare_environment()
    if hosts:
        use_interface_of(hosts.addresses[0])
    # hides Ray's notice about authentication, which appears in every run
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    common: dict[str, Any] = {"log_to_driver": DEBUG in os.environ, "logging_level": "warning"}
    joins = bool(os.environ.get("RAY_ADDRESS"))
    with guarded() as reaper, nullcontext() if joins else run_temp_directory(reaper):
        if joins:
            with starting.waiting_for(f"the Ray cluster at {os.environ['RAY_ADDRESS']}"):
                _init(**common)
        else:
            if shlex.quote(sys.executable) != sys.executable:
                # a shell starts Ray's workers with this path unquoted: with blanks in it no worker would start
                common["runtime_env"] = {"py_executable": shlex.quote(sys.executable)}
            if hosts:
                common |= {"_node_ip_address": hosts.addresses[0]} | _gpus_of_a_host(devices_per_node)
            sessions = Path(get_default_ray_temp_dir()).resolve()  # not through a link that is removed earlier
            if not sessions.exists():  # an existing directory may belong to another run
                reaper.remove_if_empty(sessions)
            placeholder = sessions, f"session_*_{os.getpid()}"  # until the session directory is known
            if DEBUG not in os.environ:
                reaper.remove_at_the_end(*placeholder)
            with starting.waiting_for("Ray"), lean(shows_logs=DEBUG in os.environ):
                started = _init("local", include_dashboard=False, **_offered(devices_per_node), **common)
            session = Path(started.address_info["session_dir"]).resolve()
            starting.logs = session / "logs"
            if logs:
                reaper.copy_at_the_end(starting.logs, logs / "ray" / session.name)
            if DEBUG not in os.environ:
                reaper.remove_at_the_end(session)
                reaper.cancel_removal(*placeholder)  # its pid may also exist in a container that shares /tmp
        try:
            if hosts:
                with starting.waiting_for("Ray on the other hosts"):
                    hosts.join(_gcs_address(), devices_per_node, min(starting.seconds, MAX_JOIN_S))
            yield
        finally:
            ray.shutdown()


def _gcs_address() -> str:
    return ray.get_runtime_context().gcs_address


def join_node(address: str, here: str, devices_per_node: int) -> Node:
    """Start a Ray node on this host, which joins the cluster at `address`.

    `here` is the address of this host.
    """
    offered = _offered(devices_per_node) | _gpus_of_a_host(devices_per_node)
    params = RayParams(gcs_address=address, node_ip_address=here, **offered)
    with lean(shows_logs=DEBUG in os.environ):
        return Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)


def ended_processes(node: Node) -> str | None:
    """Return an error message that lists the ended Ray processes of `node`; None if all processes run."""
    ended = [f"{kind} ({_how(process.returncode)})" for kind, process in node.dead_processes()]
    return f"Ray's {' and '.join(ended)} has ended" if ended else None


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _offered(devices_per_node: int) -> dict[str, Any]:
    """Return the Ray options for the number of CPUs and slots of this machine."""
    return {
        "num_cpus": max(os.cpu_count() or 1, devices_per_node),
        "resources": {SLOT: float(devices_per_node)},
    }


def _gpus_of_a_host(devices_per_node: int) -> dict[str, Any]:
    """Return the Ray option for the number of GPUs of a host in a multi-host run.

    If the host has GPUs, the number is `devices_per_node`. If it has none, the result is empty.
    """
    return {"num_gpus": devices_per_node} if count_gpus() else {}


def _init(*args: Any, **options: Any) -> Any:
    """Start or join Ray, and return its context. Raises ClusterError on failure.

    Ray's SIGTERM handler is not installed, because it would end this process with exit code 15.
    """
    handler = ray._private.utils.set_sigterm_handler
    ray._private.utils.set_sigterm_handler = lambda _: None
    try:
        return ray.init(*args, **options)
    except RunError:  # raised by a signal handler
        raise
    except Exception as error:  # Ray raises various types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ClusterError(f"Ray does not start: {type(error).__name__}: {' '.join(lines[:3])}") from error
    finally:
        ray._private.utils.set_sigterm_handler = handler
