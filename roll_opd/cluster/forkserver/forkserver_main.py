"""Program of the fork server: it imports libraries, and forks itself when processes of the same user request it.

The server has two processes; the second process is a fork of the first. While the first process imports vLLM, the
second process imports Megatron's modules.
"""

import ctypes
import errno
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any, TextIO

from roll_opd.base.torch_imports import lazy_compile

ENVIRONMENT = dict(os.environ)  # before imports change it
PATH = list(sys.path)
# parts of vLLM that the driver may request
ANY_ENGINE, EAGER_ENGINES, GPU_ENGINES = "vllm", "vllm, eager", "vllm, on GPUs"
PR_SET_PDEATHSIG = 1  # of prctl(2)
# opened when a process initialises CUDA, and not by queries of the driver (NVML)
CUDA_DEVICE = "/dev/nvidia-uvm"
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch.cuda.is_available() without initialising CUDA

MEGATRON, ENGINES = "megatron", "engines"  # kinds of the two server processes

RAY_IMPORTS = ("pyarrow", "pydantic.v1", "requests", "jsonschema", "uvloop")  # imported by Ray in each worker
COMMON = (
    *RAY_IMPORTS,
    "torch._inductor",  # torch.use_deterministic_algorithms changes its settings; it does not import the compiler
    "transformers.modeling_utils",
)
MEGATRON_MODULES = ("roll_opd.megatron.student_engine", "roll_opd.megatron.critic_engine", "roll_opd.megatron.export")
VLLM = ("roll_opd.inference.vllm_engine", "vllm.v1.engine.async_llm", "vllm.v1.engine.core")
COMPILER = "torch._inductor.lowering"  # imported by vLLM for its custom operations; eager engines do not need it
EAGER_CORE = (  # imports of an engine core at its start
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.sample.rejection_sampler",
    "vllm.v1.worker.mamba_utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm._aiter_ops",
)

GPU_CORE = (  # imports of an engine core at its start, on a GPU
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.sample.rejection_sampler",
)


def exit_with_parent(parent: int) -> None:
    """End this process when its parent process ends.

    This works even if the parent process is killed with SIGKILL, or if this process is importing modules.

    Args:
        parent: process id of the parent process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def preload_and_serve(requests: TextIO, listeners: Mapping[str, int], alive: int) -> None:
    """Import Megatron's modules and the requested vLLM modules, then serve forks.

    The server ends when the other end of `alive` is closed. A failed import is ignored here, because the process that
    needs the module reports the error. Ray is imported only in the forks, because Ray reads its job from the
    environment at import. If an import has initialised CUDA, requests are refused, because a fork of such a process
    cannot use CUDA.

    Args:
        requests: JSON that the driver writes after it has read its configuration.
        listeners: file descriptors of the sockets of MEGATRON and ENGINES.
        alive: file descriptor of a pipe.
    """
    from roll_opd.base.torch_imports import broken_companions, hide
    from roll_opd.inference.engine_arguments import prepare_environment

    modules: dict[str, Any] = sys.modules
    modules["ray"] = None  # vLLM tries to import it
    hide(broken_companions())
    gc.disable()  # garbage collections free nothing and take a fifth of the import time
    prepare_environment(eager_on_cpu=False)  # vLLM reads a part of it at import
    nvml_check = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"
    with lazy_compile():
        _import(COMMON)
        first = os.getpid()
        kind, other = (ENGINES, MEGATRON) if os.fork() else (MEGATRON, ENGINES)
        os.close(listeners[other])  # so that requests to a dead process fail immediately
        if kind == MEGATRON:
            exit_with_parent(first)
            _import(MEGATRON_MODULES)
        else:
            _import_engines(json.loads(requests.read() or "{}"))
    del modules["ray"]
    if kind == MEGATRON:  # vLLM sets it at import
        del os.environ[NVML_CHECK]
        os.environ |= {} if nvml_check is None else {NVML_CHECK: nvml_check}
    if is_open(CUDA_DEVICE):
        print(f"an import initialised CUDA, so workers ({kind}) start without preloaded libraries", file=sys.stderr)
        os.close(listeners[kind])  # requests fail immediately
        os.read(alive, 1)  # wait until the driver closes it, because the other server process must not end
        return
    gc.freeze()  # so that collections in the forks do not copy these pages
    gc.enable()
    _serve(listeners[kind], alive)


def is_open(device: str) -> bool:
    """Return whether this process has an open file descriptor for the device file `device`."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target == device:
            return True
    return False


def _import_engines(request: Mapping[str, Any]) -> None:
    """Import the requested parts of vLLM, with the variables of the request set in the environment."""
    modules: dict[str, Any] = sys.modules
    wanted = request.get("engines", "")
    os.environ |= request.get("variables", {})
    if wanted == ANY_ENGINE:
        _import(VLLM)
    if wanted == EAGER_ENGINES:
        modules.setdefault(COMPILER, None)
        _import(VLLM + EAGER_CORE)
        if modules[COMPILER] is None:
            del modules[COMPILER]
        with suppress(Exception):
            _prepare_cores()
    if wanted == GPU_ENGINES:
        _import(VLLM + GPU_CORE)


def _prepare_cores() -> None:
    """Set up the engine core once for all forks: logging, and CPU kernels that replace Triton's.

    An engine core would search all loaded modules for Triton kernels, which takes 0.7 s. This function searches only
    vLLM's modules.
    """
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher
    from vllm.v1.engine import core

    from roll_opd.inference.cpu_kernels import expands_all_types

    configure_logging_if_needed(LoggingConfig())
    vars(core)["configure_logging"] = configure_logging_if_needed  # the original iterates over all loggers

    of_vllm = {name: module for name, module in sys.modules.items() if name.startswith("vllm")}
    patched: Any = dispatcher
    patched.sys = SimpleNamespace(modules=of_vllm)
    expands_all_types()
    try:
        current_platform.register_triton_kernel_overrides()
    finally:
        patched.sys = sys
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def _serve(listener: int, alive: int) -> None:
    """Serve forks, but only to processes of this user."""
    module: Any = forkserver
    module.socket = SimpleNamespace(socket=_SameUserSocket, AF_UNIX=socket.AF_UNIX)
    forkserver.main(listener, alive, [])


class _SameUserSocket(socket.socket):
    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", peer)[1] != os.getuid():
            connection.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, "another user")  # the server ignores this error
        return connection, address


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        with suppress(Exception):
            importlib.import_module(module)
