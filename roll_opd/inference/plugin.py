"""Entry point `vllm.general_plugins`: what vLLM runs in each of its processes before it builds an engine.

It makes our ways to transfer weights known by name (nothing is imported until an engine asks for one), and
makes vLLM's child processes end with their parent. Other vLLM processes see no change.
"""

import multiprocessing
import os
import threading
from contextlib import suppress
from typing import Any

from roll_opd.inference.coalesce_outputs import sends_whole_outputs
from roll_opd.inference.failure import listen
from roll_opd.inference.parent_watchdog import ORPHAN_EXIT_CODE

PLUGIN_NAME = "roll_opd"
# ways to transfer weights; the latter two are vLLM's own, with a check that all arrived
SHARED_MEMORY, CUDA_IPC, NCCL = "shared_memory", "checked_ipc", "checked_nccl"
BACKENDS = {
    SHARED_MEMORY: ("roll_opd.weight_sync.shared_memory", "SharedMemoryWeightTransferEngine"),
    CUDA_IPC: ("roll_opd.weight_sync.cuda_transfer", "CheckedIpcEngine"),
    NCCL: ("roll_opd.weight_sync.cuda_transfer", "CheckedNcclEngine"),
}
DIE_WITH_PARENT = "ROLL_OPD_DIE_WITH_PARENT"
_THREAD_NAME = "roll_opd-follow-parent"


def register() -> None:
    """Register the weight transfer, and have failures told; with `ROLL_OPD_DIE_WITH_PARENT=1` also watch the parent.

    Idempotent.
    """
    listen()
    _register_backends()
    if os.environ.get(DIE_WITH_PARENT) == "1":
        _follow_parent()
        _leave_no_semaphore()
        _end_without_tidying()
        _record_routes()
        _send_whole_outputs()


def _register_backends() -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a vLLM without weight transfer: leave it as it is
        return
    for name, place in BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, *place)


def _leave_no_semaphore() -> None:
    # tqdm's bars share a lock between processes, whose name would stay in /dev/shm when this process is killed
    with suppress(ImportError):
        from tqdm import std

        lock: Any = std.TqdmDefaultWriteLock  # makes the attribute when it is first asked for one
        lock.mp_lock = None


def _end_without_tidying() -> None:
    # an engine core on CPUs would close its groups and collect garbage for a second or two, and then end
    if multiprocessing.parent_process() is None:
        return
    with suppress(ImportError):
        from vllm.platforms import current_platform
        from vllm.v1.engine import core

        ending: Any = core
        if current_platform.is_cpu():
            ending.cleanup_dist_env_and_memory = lambda *_, **__: leave_no_meeting_place()


def _record_routes() -> None:
    from roll_opd.inference.routes import RECORDS_ROUTES, record_routes

    if os.environ.get(RECORDS_ROUTES) == "1" and multiprocessing.parent_process() is not None:
        record_routes()


def _send_whole_outputs() -> None:
    if multiprocessing.parent_process() is None:  # the front, which schedules nothing
        return
    with suppress(ImportError):
        from vllm.v1.core.sched.scheduler import Scheduler

        scheduler: Any = Scheduler
        if not hasattr(scheduler, "sends_whole_outputs"):
            scheduler.sends_whole_outputs = True
            scheduler.update_from_output = sends_whole_outputs(Scheduler.update_from_output)


def leave_no_meeting_place() -> None:
    """Remove the file at which this process met the others of its group, as closing the group would."""
    from torch.distributed import distributed_c10d

    with suppress(ValueError, AttributeError, OSError):  # there is no group, or it did not meet at a file
        store: Any = distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        os.unlink(store.path)


def _follow_parent() -> None:
    # only vLLM's own children (engine core, workers): a front process may well outlive its shell
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return

    def end_with_it() -> None:
        parent.join()  # not the parent of the operating system's, which may be a server that has forked this process
        os._exit(ORPHAN_EXIT_CODE)

    threading.Thread(target=end_with_it, name=_THREAD_NAME, daemon=True).start()
