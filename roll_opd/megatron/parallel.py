"""Process groups and device (CUDA or CPU) of one Megatron rank.

`torchrun` or the project's Ray workers set these environment variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT.
"""

import contextlib
import datetime
import os
import warnings

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from roll_opd.base.hardware import CUBLAS_WORKSPACE
from roll_opd.config.plan import Layout
from roll_opd.megatron.cpu_port import install_cpu_port, shared_groups
from roll_opd.megatron.flash_kernels import check_kernel
from roll_opd.megatron.fused_updates import fuse_gradient_norm, fuse_weight_gradients
from roll_opd.megatron.packing import ContextRank
from roll_opd.megatron.rotary import install_rotary

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # a user's settings of CUDA's allocator
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)  # a peer may be loading a large checkpoint
_writers: dist.ProcessGroup | None = None


def initialize(layout: Layout, seed: int, deterministic: bool = True) -> torch.device:
    """Initialise the process groups for a layout, and return this rank's device.

    Raises:
        ValueError: if WORLD_SIZE does not match the layout, or if the chosen flash attention kernel is not available.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != layout.world_size:
        raise ValueError(
            f"WORLD_SIZE is {world_size} but tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp} "
            f"needs {layout.world_size} ranks: start that many, or change the layout"
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        check_kernel(torch.cuda.get_device_capability(device))
        # this rank's device is current already; passing `device_id` to init_process_group would connect all groups
        # eagerly
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
        backend = "nccl"
        groups: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        fuse_weight_gradients()
        fuse_gradient_norm()
    else:
        device, backend, groups = torch.device("cpu"), "gloo", shared_groups()
        install_cpu_port()
    install_rotary()
    disable_cudnn_attention()
    for name, value in CUBLAS_WORKSPACE.items():  # cuBLAS reads it once, possibly before a deterministic learner exists
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(deterministic)
    with groups:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return device


def disable_cudnn_attention() -> None:
    """Disable cuDNN's attention in this process.

    On Hopper, torch prefers cuDNN's attention in bf16, but cuDNN builds a plan for every new pack shape. On an H100,
    building a plan takes 0.1 to 1.9 s, while flash attention takes 1 ms.

    Importing vLLM also disables cuDNN's attention. Without this function, processes with vLLM and processes without
    vLLM would use different kernels.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def use_expandable_segments() -> None:
    """Enable expandable segments in CUDA's allocator, unless an environment variable configures the allocator.

    Without expandable segments, packs of different lengths fragment the allocator's memory. Call this function before
    any allocation. Do not call it in these processes:

    - processes that share memory through CUDA IPC handles, because these may not work with expandable segments
    - vLLM's processes, because vLLM's memory pool does not support expandable segments
    """
    if torch.cuda.is_available() and not any(name in os.environ for name in ALLOCATORS):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def returns_results() -> bool:
    """Return whether this rank returns the results of its model replica.

    In each replica, one rank returns them: the first tensor rank and first context rank of the last pipeline stage.
    """
    return (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def context_rank() -> ContextRank:
    """Return this rank's number in its context-parallel group, with the size of the group and the group itself."""
    group = parallel_state.get_context_parallel_group()
    return ContextRank(dist.get_rank(group), dist.get_world_size(group), group)


def tensor_rank(*, expert: bool = False) -> tuple[int, int]:
    """Return (rank, size) in the tensor-parallel group.

    With `expert`, the expert-tensor-parallel group is used instead.
    """
    if expert:
        group = parallel_state.get_expert_tensor_parallel_group()
        return dist.get_rank(group), dist.get_world_size(group)
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def writer_group() -> dist.ProcessGroup:
    """Return a gloo group of all ranks for background writers. The first call is collective."""
    global _writers
    if _writers is None:
        _writers = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return _writers


def shutdown() -> None:
    """Destroy all process groups."""
    global _writers
    _writers = None
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
