"""Ray: started for one run and gone with it, or joined where a cluster is already up."""

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from roll_opd.cluster.lean_ray import lean
from roll_opd.cluster.process_reaper import guarded
from roll_opd.cluster.ray_environment import prepare_environment
from roll_opd.cluster.start_up import ClusterError, StartUp
from roll_opd.failures import DEBUG

SLOT = "roll_opd_slot"  # what a device is called on a machine without GPUs


@contextmanager
def ray_cluster(devices_per_node: int, starting: StartUp | None = None) -> Iterator[None]:
    """Have Ray up inside the `with` block.

    With RAY_ADDRESS set (a cluster that somebody else started), join it. Otherwise start one on this machine whose
    processes die with this one, SIGKILL included, and whose session directory goes with them. Besides its GPUs the
    machine offers `devices_per_node` slots, which stand for devices where there is no GPU.
    """
    starting = starting or StartUp()
    prepare_environment()
    # authentication stays on; its notice would be printed in every run
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    common: dict[str, Any] = {"log_to_driver": DEBUG in os.environ, "logging_level": "warning"}
    with guarded() as reaper:
        if os.environ.get("RAY_ADDRESS"):
            with starting.waiting_for(f"the Ray cluster at {os.environ['RAY_ADDRESS']}"):
                _init(**common)
        else:
            if shlex.quote(sys.executable) != sys.executable:
                # a shell starts Ray's workers with this path as it is: below "My Projects" none would ever start
                common["runtime_env"] = {"py_executable": shlex.quote(sys.executable)}
            cores = max(os.cpu_count() or 1, devices_per_node)
            resources = {SLOT: float(devices_per_node)}
            with starting.waiting_for("Ray"), lean(shows_logs=DEBUG in os.environ):
                started = _init("local", include_dashboard=False, num_cpus=cores, resources=resources, **common)
            session = Path(started.address_info["session_dir"])
            starting.logs = session / "logs"
            if DEBUG not in os.environ:
                reaper.remove_at_the_end(session)
        try:
            yield
        finally:
            ray.shutdown()


def _init(*args: Any, **options: Any) -> Any:
    """Start Ray, or join it; return what Ray says of it. ClusterError where it does not start."""
    try:
        return ray.init(*args, **options)
    except Exception as error:  # Ray raises plain ones, too
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ClusterError(f"Ray does not start: {type(error).__name__}: {' '.join(lines[:3])}") from error
