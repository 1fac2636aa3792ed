"""A port of megatron-core to CPU and gloo.

megatron-core calls CUDA even for operations that any device could run. `install_cpu_port` permanently redirects these
calls in this process. Call it only in processes that run nothing but Megatron: a Hugging Face model that is built after
this call has corrupt buffers.
"""

import contextlib
import datetime
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer.moe import token_dispatcher
from torch.distributed import distributed_c10d

_CPU = torch.device("cpu")
_CONSTRUCTORS = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like")


class _NoStream:
    """CUDA stream or event that does nothing, because operations on a CPU run in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *_: Any) -> "_NoStream":
        return self


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")


def _on_cpu(constructor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor constructor: a CUDA `device` is replaced by the CPU, and `pin_memory` is dropped."""

    @functools.wraps(constructor)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return constructor(*args, **kwargs)

    return wrapped


def _gather_unequal(
    original: Callable[..., torch.Tensor],
    piece: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Gather pieces of unequal length.

    The pieces are padded to equal length, because gloo cannot gather pieces of unequal length.
    """
    if sizes is None or group.size() == 1:
        return original(piece, group, sizes, use_global_buffer)
    if not any(sizes):
        return piece
    padded = piece.new_zeros(max(sizes), *piece.shape[1:])
    padded[: len(piece)] = piece
    whole = original(padded, group).split(max(sizes))
    return torch.cat([own[:size] for own, size in zip(whole, sizes, strict=True)])


def _reduce_scatter_unequal(
    original: Callable[..., torch.Tensor],
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Reduce-scatter pieces of unequal length.

    The complete tensor is all-reduced, and this rank's piece is returned.
    """
    if sizes is None or group.size() == 1:
        return original(whole, group, sizes, use_global_buffer)
    summed = whole.clone()
    dist.all_reduce(summed, group=group)
    return summed.split(list(sizes))[group.rank()]


def _listed(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.type` to return CUDA type names, because the optimizer sorts parameters by these names."""

    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return wrapped


def install_cpu_port() -> None:
    """Redirect megatron-core's CUDA calls to the CPU in this process. Idempotent."""
    if getattr(torch.cuda, "_roll_opd_cpu_port", False):
        return
    # functions that Megatron compiles would need a C++ compiler and seconds for the first sizes of a pack
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for name in _CONSTRUCTORS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = module.cuda = lambda self, *_, **__: self
    tensor.type = _type_as_on_cuda(tensor.type)

    cuda: Any = torch.cuda
    cuda._roll_opd_cpu_port = True
    cuda.current_device = lambda: _CPU
    cuda.device_count = lambda: 1
    for name in ("set_device", "synchronize", "empty_cache"):  # separate functions: torch's compiler refuses aliases
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Stream = cuda.Event = _NoStream
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *_, **__: _NoStream())
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.FloatTensor, cuda.HalfTensor = torch.FloatTensor, torch.HalfTensor
    cuda.BFloat16Tensor = torch.BFloat16Tensor

    collectives: Any = mappings
    gather, scatter = collectives._gather_along_first_dim, collectives._reduce_scatter_along_first_dim
    collectives._gather_along_first_dim = functools.partial(_gather_unequal, gather)
    collectives._reduce_scatter_along_first_dim = functools.partial(_reduce_scatter_unequal, scatter)
    # token counts are converted to lists only on CUDA
    exchange = token_dispatcher.all_to_all
    token_dispatcher.all_to_all = lambda group, tokens, *sizes: exchange(group, tokens, *map(_listed, sizes))

    # "CUDA" calls use the CPU's random state; Megatron's warning that the CPU's state changed is therefore expected
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


class _SharedThreadGloo(dist.ProcessGroupGloo):
    """gloo process group that shares the connection thread of this process's first group."""

    devices: ClassVar[list[Any]] = []  # devices of the first group; kept until the process exits

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        options: Any
        if self.devices:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices, options._timeout = self.devices, timeout
            super().__init__(store, rank, size, options)
        else:
            super().__init__(store, rank, size, timeout)
            options = self.options
            self.devices.extend(options._devices)
            _yield_to_workers()


def _yield_to_workers() -> None:
    """Lower the priority of gloo's connection thread, because it spins while a worker thread holds a lock."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread may have ended
            if Path(f"/proc/self/task/{thread}/comm").read_text().strip() == "gloo_tcp_loop":
                os.setpriority(os.PRIO_PROCESS, int(thread), 10)


@contextlib.contextmanager
def shared_groups() -> Iterator[None]:
    """Create only one process group per set of ranks inside the `with` block. Megatron would create about thirty.

    Normally, each gloo group has a thread that wakes up a hundred times per second. Here all groups of a process share
    one thread.
    """
    create, made = parallel_state.create_group, {}

    def created(ranks: Sequence[int], **settings: Any) -> Any:
        if tuple(ranks) not in made:
            made[tuple(ranks)] = create(ranks, **settings)
        return made[tuple(ranks)]

    state: Any = parallel_state
    groups: Any = distributed_c10d
    gloo = groups.ProcessGroupGloo
    state.create_group, groups.ProcessGroupGloo = created, _SharedThreadGloo
    try:
        yield
    finally:
        state.create_group, groups.ProcessGroupGloo = create, gloo
