"""The warm server's own side: what it imports, whom it serves, and what its forks must know of the time before.

It is two processes: one, a fork of the other, imports what Megatron's roles need while the other imports vLLM.
"""

import ctypes
import errno
import functools
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any, TextIO

ENVIRONMENT = dict(os.environ)  # before any import has changed it
PATH = list(sys.path)
ANY_ENGINE, EAGER_ENGINES = "vllm", "vllm, eager"  # what the driver may want besides Megatron
PR_SET_PDEATHSIG = 1  # of prctl(2)

MEGATRON, ENGINES = "megatron", "engines"  # whose forks a process may be, of the two

OF_RAY = ("pyarrow", "pydantic.v1", "requests", "jsonschema", "uvloop")  # it imports them in each of its workers
COMMON = (
    *OF_RAY,
    "torch._inductor",  # whose settings torch.use_deterministic_algorithms sets; the compiler itself is not in it
    "transformers.modeling_utils",
)
OF_MEGATRON = ("roll_opd.megatron.trainer", "roll_opd.megatron.critic", "roll_opd.megatron.export")
VLLM = ("roll_opd.inference.engine", "vllm.v1.engine.async_llm", "vllm.v1.engine.core")
COMPILER = "torch._inductor.lowering"  # vLLM prepares it for its own operations, which eager engines do not compile
EAGER_CORE = (  # what an engine core imports as it starts
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.sample.rejection_sampler",
    "vllm.v1.worker.mamba_utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm._aiter_ops",
)


def follow(parent: int) -> None:
    """End this process with `parent`, which has started it, also by SIGKILL and while something is being imported."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def preload_and_serve(requests: TextIO, listeners: Mapping[str, int], alive: int) -> None:
    """Import Megatron's modules and the requested ones of vLLM; serve forks until the other end of `alive` is closed.

    `requests` is JSON that the driver writes once it has read its configuration; `listeners` are the sockets of
    MEGATRON and ENGINES. A failing import is left to the process that needs the module, which reports the error. Ray
    is left to the forks, since it reads its job from the environment when it is imported.
    """
    from roll_opd.base.optional_torch_packages import broken_companions, hide
    from roll_opd.inference.settings import prepare_environment

    modules: dict[str, Any] = sys.modules
    modules["ray"] = None  # vLLM tries to import it
    hide(broken_companions())
    gc.disable()  # a collection finds nothing, and takes a fifth of the time
    prepare_environment(eager_on_cpu=False)  # vLLM reads a part of it as it is imported
    with compiling_later():
        _import(COMMON)
        first = os.getpid()
        kind, other = (ENGINES, MEGATRON) if os.fork() else (MEGATRON, ENGINES)
        os.close(listeners[other])  # who asks a process that has died is to know at once
        if kind == MEGATRON:
            follow(first)
            _import(OF_MEGATRON)
        else:
            _import_engines(json.loads(requests.read() or "{}"))
    del modules["ray"]
    gc.freeze()  # so that collections in the forks do not copy all of these pages
    gc.enable()
    _serve(listeners[kind], alive)


def _import_engines(request: Mapping[str, Any]) -> None:
    """Import the parts of vLLM that the driver requests, with its `variables` in the environment."""
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


def _prepare_cores() -> None:
    """Do for all forks what each engine core does: set up logging, and put kernels for CPUs in the place of Triton's.

    A core looks for these in every module there is, for 0.7 s. They are in vLLM's.
    """
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher
    from vllm.v1.engine import core

    configure_logging_if_needed(LoggingConfig())
    vars(core)["configure_logging"] = configure_logging_if_needed  # it walks all loggers there are

    of_vllm = {name: module for name, module in sys.modules.items() if name.startswith("vllm")}
    looking: Any = dispatcher
    looking.sys = SimpleNamespace(modules=of_vllm)
    try:
        current_platform.register_triton_kernel_overrides()
    finally:
        looking.sys = sys
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def _serve(listener: int, alive: int) -> None:
    """Fork for the processes of this user."""
    module: Any = forkserver
    module.socket = SimpleNamespace(socket=_OfOneUser, AF_UNIX=socket.AF_UNIX)
    forkserver.main(listener, alive, [])


class _OfOneUser(socket.socket):
    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", peer)[1] != os.getuid():
            connection.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, "another user")  # and the server goes on
        return connection, address


@contextmanager
def compiling_later() -> Iterator[None]:
    """Have a function that `torch.compile` decorates inside the block compiled at its first call, if there is one.

    Megatron alone imports the compiler for some it decorates, which on CPUs are hardly ever called.
    """
    torch: Any = importlib.import_module("torch")
    at_once = torch.compile

    def later(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if model is None:
            return functools.partial(later, **options)

        compiled: list[Callable[..., Any]] = []

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                is_off = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
                compiled.append(model if is_off else at_once(model, **options))
            return compiled[0](*args, **kwargs)

        return call

    torch.compile = later
    try:
        yield
    finally:
        torch.compile = at_once


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        with suppress(Exception):
            importlib.import_module(module)
