"""Ray: started for one run and gone with it, or joined where a cluster is already up."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from roll_opd.cluster.process_reaper import guarded

SLOT = "roll_opd_slot"  # what a device is called on a machine without GPUs


class ClusterError(RuntimeError):
    """The cluster cannot hold the run; the message says what is missing and what to do."""


@contextmanager
def ray_cluster(devices_per_node: int) -> Iterator[None]:
    """Have Ray up inside the `with` block.

    With RAY_ADDRESS set (a cluster that somebody else started), join it. Otherwise start one on this machine whose
    processes die with this one, SIGKILL included. Besides its GPUs the machine offers `devices_per_node` slots,
    which stand for devices where there is no GPU.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the workers are the run: no other process goes first
    # authentication stays on; its notice would be printed in every run
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    common: dict[str, Any] = {"log_to_driver": "ROLL_OPD_DEBUG" in os.environ, "logging_level": "warning"}
    with guarded():
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**common)
        else:
            for counted in ("RAY_enable_metrics_collection", "RAY_event_stats", "RAY_task_events_report_interval_ms"):
                os.environ.setdefault(counted, "0")  # the metrics of a cluster of one run are never read
            cores = max(os.cpu_count() or 1, devices_per_node)
            resources = {SLOT: float(devices_per_node)}
            ray.init("local", include_dashboard=False, num_cpus=cores, resources=resources, **common)
        try:
            yield
        finally:
            ray.shutdown()
