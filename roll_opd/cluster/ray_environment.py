"""Set the environment variables of Ray and torch, and the temporary directory of a run's processes.

Ray and torch read many variables when they are imported. Therefore this module imports neither of them.

vLLM and killed processes leave sockets and rendezvous files in TMPDIR. So each run has a separate TMPDIR, which is
removed when the run ends or is killed.
"""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from roll_opd.base.failures import RunError, os_sentence
from roll_opd.base.hardware import CUBLAS_WORKSPACE
from roll_opd.base.paths import use_cache_of_compilers
from roll_opd.cluster.process_reaper import Reaper

ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # workers have the normal priority
}
# in a cluster of one run, metrics are never read and prestarted workers never used
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
    # the run detects lost hosts (`HeartbeatChannel`); 20 s of packet loss must not close connections
    "RAY_grpc_keepalive_timeout_ms": "60000",
}
TORCH = {
    "GOMP_SPINCOUNT": "1000",  # threads spin only briefly before they sleep, since roles share the cores
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages make the allocation of large tensors four times as fast
} | CUBLAS_WORKSPACE


def prepare_environment() -> None:
    """Set the environment variables for a new Ray cluster, or for a joined cluster (RAY_ADDRESS).

    Variables that the user has set are not changed.
    """
    joins = bool(os.environ.get("RAY_ADDRESS"))
    use_cache_of_compilers(os.environ)
    for name, value in (ALWAYS | TORCH | ({} if joins else OWN_CLUSTER)).items():
        os.environ.setdefault(name, value)
    # a new token: otherwise Ray writes one into the home directory, which may not exist
    if not joins and not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def token_variables() -> dict[str, str]:
    """Return the environment variables with which another host authenticates itself to this process's Ray cluster.

    If RAY_AUTH_TOKEN is not set, the token is read from Ray's token file.
    """
    found = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN") if name in os.environ}
    if "RAY_AUTH_TOKEN" not in found and found.get("RAY_AUTH_MODE") != "disabled":
        file = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
        with suppress(OSError):  # Ray reports a missing token
            found["RAY_AUTH_TOKEN"] = Path(file).read_text(encoding="utf-8").strip()
    return found


def torch_variables() -> dict[str, str]:
    """Return the names in `TORCH` with their values in this process, for the workers of a joined cluster."""
    return {name: os.environ.get(name, value) for name, value in TORCH.items()}


def use_interface_of(address: str) -> None:
    """Make gloo and vLLM use the network interface of `address`, unless the user has set an interface.

    Otherwise these libraries use the address to which the host name resolves, or the default route. The address is
    often 127.0.0.1, and the default route may not exist.
    """
    os.environ.setdefault("VLLM_HOST_IP", address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


MAX_LENGTH = 60  # characters: socket paths are limited to 107, and vLLM adds 37
FALLBACK = "/tmp"
RAY_VARIABLE = "RAY_TMPDIR"  # parent of Ray's session directories
# /ray/session_2026-11-28_19-00-00_123456_4194304/sockets/plasma_store.99 has 71 characters
MAX_RAY_LENGTH = 107 - 71


@contextmanager
def run_temp_directory(reaper: Reaper) -> Iterator[None]:
    """Context manager: set TMPDIR to a new directory for the processes that start inside the block.

    If the path of TMPDIR is too long for sockets, the new directory is in /tmp. If the parent of Ray's directories has
    a path that is too long, Ray uses a link in the new directory. Raises RunError if there is no directory for this.
    `reaper` removes the directory after the end of this process.
    """
    outer = tempfile.gettempdir()  # TMPDIR, if it can be used
    parent = _parent_of_sessions(outer)
    is_long = len(os.path.join(outer, "roll_opd-12345678")) > MAX_LENGTH or len(parent) > MAX_RAY_LENGTH
    if is_long and not os.access(FALLBACK, os.W_OK | os.X_OK):
        raise RunError(
            f"TMPDIR: {max(outer, parent, key=len)} has too many characters for sockets (at most {MAX_RAY_LENGTH}), and"
            f" {FALLBACK} cannot be written; set TMPDIR to a directory with a shorter path"
        )
    directory = tempfile.mkdtemp(prefix="roll_opd-", dir=FALLBACK if is_long else outer)
    reaper.remove_at_the_end(Path(directory))
    if len(parent) > MAX_RAY_LENGTH:
        link = os.path.join(directory, "t")
        os.symlink(parent, link)
        parent = link
    before = {name: os.environ.get(name) for name in ("TMPDIR", RAY_VARIABLE)}
    known, tempfile.tempdir = tempfile.tempdir, None  # Python caches TMPDIR at the first use
    os.environ |= {"TMPDIR": directory, RAY_VARIABLE: parent}
    try:
        yield
    finally:
        tempfile.tempdir = known
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


def _parent_of_sessions(outer: str) -> str:
    """Return the parent of Ray's session directories: RAY_TMPDIR, which is created, or `outer`."""
    written = os.environ.get(RAY_VARIABLE)
    if not written:
        return outer
    try:
        os.makedirs(written, exist_ok=True)
    except OSError as error:
        raise RunError(f"{RAY_VARIABLE}: {os_sentence(error)}; set it to a directory that can be written") from None
    if not os.access(written, os.W_OK | os.X_OK):
        raise RunError(f"{RAY_VARIABLE}: {written} cannot be written; set it to another directory")
    return os.path.abspath(written)


def socket_parent() -> str:
    """Return the directory for a temporary directory with sockets: TMPDIR, or /tmp if TMPDIR has a long path."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= MAX_LENGTH or not os.access(FALLBACK, os.W_OK | os.X_OK) else FALLBACK
