"""What Ray and torch read from the environment, much of it as they are imported, which this module does not do."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

import psutil

from roll_opd.base.hardware import CUBLAS_WORKSPACE
from roll_opd.base.paths import use_cache_of_compilers

ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # the workers are the run: no other process goes first
}
# the metrics of a cluster of one run are never read, and workers that know no role are never used
OWN_CLUSTER = dict.fromkeys(
    (
        "RAY_enable_metrics_collection",
        "RAY_event_stats",
        "RAY_task_events_report_interval_ms",
        "RAY_prestart_worker_first_driver",
        "RAY_enable_worker_prestart",
    ),
    "0",
) | {
    # of hosts that are gone the run knows by itself (`line`); packets that are lost for 20 s are no reason to hang up
    "RAY_grpc_keepalive_timeout_ms": "60000",
}
TORCH = {
    "GOMP_SPINCOUNT": "1000",  # a thread waits briefly awake, then asleep: those of other roles want the cores
    "THP_MEM_ALLOC_ENABLE": "1",  # large tensors on large pages, which the kernel gives in a quarter of the time
} | CUBLAS_WORKSPACE


def prepare_environment() -> None:
    """Set what the user has not set, for a cluster that is joined (RAY_ADDRESS) or for one of the run's own."""
    joins = bool(os.environ.get("RAY_ADDRESS"))
    use_cache_of_compilers(os.environ)
    for name, value in (ALWAYS | TORCH | ({} if joins else OWN_CLUSTER)).items():
        os.environ.setdefault(name, value)
    # a token of its own: Ray would write one into the home directory, which may not be there
    if not joins and not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def token_variables() -> dict[str, str]:
    """Return what Ray on another host needs in its environment to be let into the cluster that this process started.

    Ray reads the token of this host from a file where none is in the environment.
    """
    found = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN") if name in os.environ}
    if "RAY_AUTH_TOKEN" not in found and found.get("RAY_AUTH_MODE") != "disabled":
        file = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
        with suppress(OSError):  # Ray says itself what it misses
            found["RAY_AUTH_TOKEN"] = Path(file).read_text(encoding="utf-8").strip()
    return found


def torch_variables() -> dict[str, str]:
    """Return `TORCH` as this process has it, for those whose environment is another's (RAY_ADDRESS)."""
    return {name: os.environ.get(name, value) for name, value in TORCH.items()}


def use_the_network_of(address: str) -> None:
    """Have gloo and vLLM take the address by which the hosts know this one, where the user has not said otherwise.

    They would ask the name of the host, which often means 127.0.0.1, or the way to the internet, which may not exist.
    """
    os.environ.setdefault("VLLM_HOST_IP", address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
