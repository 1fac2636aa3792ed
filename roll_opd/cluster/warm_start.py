"""Processes that begin warm: one imports what a run's processes need, and they are forks of it.

torch, Megatron and vLLM take 8 to 11 s of CPU to import, and a run on one machine has five processes or more that need
them. A warm server (Python's own `multiprocessing.forkserver`) imports them once, while the driver reads its data and
starts Ray. Ray then starts `warm_worker` in place of the interpreter: it asks the server for a fork that runs what the
interpreter would have run. The engine core, which vLLM would spawn, is a fork of the same server.

Only where there is no GPU: a process that has touched CUDA cannot be forked, and imports are nothing beside loading
such models.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from roll_opd.cluster.ray_environment import prepare_environment
from roll_opd.cluster.warm_worker import ADDRESS, WARM
from roll_opd.config.plan import RunPlan
from roll_opd.failures import DEBUG

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, the same under WSL, AMD's

_SERVE = (
    "import ctypes, sys; ctypes.CDLL(None).prctl(1, 9); sys.path[:] = {path!r}\n"  # SIGKILL with the driver
    "from roll_opd.cluster.preloaded import preload; preload(vllm={vllm})\n"
    "from multiprocessing.forkserver import main; main({listener}, {alive}, [])"
)


@contextmanager
def warm_start(plan: RunPlan) -> Iterator[None]:
    """Have what the processes of `plan` need imported beside the block, where they can be forks: on this machine alone,
    and without GPUs.

    The server that does it ends with this process, however that ends.
    """
    if ADDRESS in os.environ or os.environ.get("RAY_ADDRESS") or any(map(os.path.exists, GPU_FILES)):
        yield
        return
    prepare_environment()
    cores = len(os.sched_getaffinity(0))
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // plan.devices_per_node))}
    with tempfile.TemporaryDirectory(prefix="roll_opd-warm-") as place, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(place, "socket"))
        listener.listen()
        alive_r, alive_w = os.pipe()
        said = None if DEBUG in os.environ else subprocess.DEVNULL
        passed = (listener.fileno(), alive_r)
        code = _SERVE.format(path=sys.path, vllm=plan.rollout is not None, listener=passed[0], alive=passed[1])
        server = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
        )
        os.close(alive_r)
        os.environ[ADDRESS] = listener.getsockname()
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            os.close(alive_w)
            server.kill()  # it may still import
            server.wait()


def variables(*, is_warm: bool = True) -> dict[str, str]:
    """Return what a worker's environment needs for it to begin warm: nothing where no server is."""
    return {WARM: "1"} if is_warm and ADDRESS in os.environ else {}
