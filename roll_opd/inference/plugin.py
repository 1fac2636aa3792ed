"""Entry point `vllm.general_plugins`. vLLM calls it in each of its processes before it builds an engine.

The plugin registers our weight-transfer backends by name. vLLM imports a backend only when it is used. If roll_opd
started the engine, the plugin also patches vLLM, and makes vLLM's child processes exit when their parent dies.
"""

import multiprocessing
import os
from contextlib import suppress
from typing import Any

from roll_opd.base.torch_imports import import_without_torchvision
from roll_opd.inference.coalesce_outputs import coalesces_outputs, ends_version, sends_versions
from roll_opd.inference.failed_start import die_with_parent, record_errors

PLUGIN_NAME = "roll_opd"
# weight-transfer backends; `checked_*` are vLLM's, with a check that all weights arrived
SHARED_MEMORY, CUDA_IPC, NCCL, M2N = "shared_memory", "checked_ipc", "checked_nccl", "checked_m2n"
BACKENDS = {
    SHARED_MEMORY: ("roll_opd.weight_sync.shared_memory_receiver", "SharedMemoryWeightTransferEngine"),
    CUDA_IPC: ("roll_opd.weight_sync.cuda_receiver", "CheckedIpcEngine"),
    NCCL: ("roll_opd.weight_sync.cuda_receiver", "CheckedNcclEngine"),
    M2N: ("roll_opd.weight_sync.m2n_receiver", "CheckedM2NEngine"),
}
DIE_WITH_PARENT = "ROLL_OPD_DIE_WITH_PARENT"


def register() -> None:
    """Register the weight-transfer backends, and record errors. Idempotent.

    With `ROLL_OPD_DIE_WITH_PARENT=1`, also patch vLLM, and make this process exit when its parent dies.
    """
    record_errors()
    import_without_torchvision()
    _register_backends()
    if os.environ.get(DIE_WITH_PARENT) == "1":
        if multiprocessing.parent_process() is not None:  # a front end may outlive its shell
            die_with_parent()
        _drop_tqdm_lock()
        _skip_cleanup()
        _inspect_here()
        _correct_cpu_kernels()
        _record_routes()
        _coalesce_outputs()


def _register_backends() -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a vLLM without weight transfer
        return
    for name, place in BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, *place)


def _drop_tqdm_lock() -> None:
    # if this process is killed, the semaphore of tqdm's inter-process lock would remain in /dev/shm
    with suppress(ImportError):
        from tqdm import std

        lock: Any = std.TqdmDefaultWriteLock  # set by tqdm on first use
        lock.mp_lock = None


def _skip_cleanup() -> None:
    # on CPUs, an engine core needs a second or two to close its groups and collect garbage before it ends
    if multiprocessing.parent_process() is None:
        return
    with suppress(ImportError):
        from vllm.platforms import current_platform
        from vllm.v1.engine import core

        module: Any = core
        if current_platform.is_cpu():
            module.cleanup_dist_env_and_memory = lambda *_, **__: remove_rendezvous_file()


def _inspect_here() -> None:
    # vLLM inspects the class of a model in a new process, because an import may initialise CUDA. On CPUs, that process
    # only imports vLLM again: 37 s of the first start with two engines on two cores
    with suppress(ImportError):
        from vllm.model_executor.models import registry
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            module: Any = registry
            module._run_in_subprocess = lambda inspect: inspect()


def _correct_cpu_kernels() -> None:
    if multiprocessing.parent_process() is None:
        return
    with suppress(ImportError):
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from roll_opd.inference.cpu_kernels import copies_single_tokens, expands_all_types

            copies_single_tokens()
            expands_all_types()


def _record_routes() -> None:
    from roll_opd.inference.router_replay import RECORDS_ROUTES, record_routes

    if os.environ.get(RECORDS_ROUTES) == "1" and multiprocessing.parent_process() is not None:
        record_routes()


def _coalesce_outputs() -> None:
    if multiprocessing.parent_process() is None:  # the front end, which schedules nothing
        return
    with suppress(ImportError):
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCoreProc

        scheduler: Any = Scheduler
        core: Any = EngineCoreProc
        if not hasattr(scheduler, "coalesces_outputs"):
            scheduler.coalesces_outputs = True
            scheduler.update_from_output = coalesces_outputs(Scheduler.update_from_output)
            core.set_weight_version = ends_version(EngineCoreProc.set_weight_version)
            core._attach_weight_version = sends_versions(EngineCoreProc._attach_weight_version)


def remove_rendezvous_file() -> None:
    """Remove the rendezvous file of this process's group.

    The file must be removed here, because the group is not closed. Closing the group would also remove the file.
    """
    from torch.distributed import distributed_c10d

    with suppress(ValueError, AttributeError, OSError):  # no group, or a rendezvous without a file
        store: Any = distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        os.unlink(store.path)
