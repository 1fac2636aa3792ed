"""Process groups and device of one Megatron rank; the only place that decides between CUDA and CPU.

Reads what `torchrun` and our Ray workers both set: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

import contextlib
import datetime
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from roll_opd.base.hardware import CUBLAS_WORKSPACE
from roll_opd.config.plan import Layout
from roll_opd.megatron.context import ContextRank
from roll_opd.megatron.cpu import install_cpu_port, shared_groups
from roll_opd.megatron.fused_updates import add_gradients_in_products, norm_in_one_pass
from roll_opd.megatron.rotary import install_rotation

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # where a user says how CUDA memory is held
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)  # a peer may be loading a large checkpoint
_writers: dist.ProcessGroup | None = None


def initialize(layout: Layout, seed: int, deterministic: bool = True) -> torch.device:
    """Join the process group, build Megatron's groups for `layout`, and return this rank's device.

    Raises:
        ValueError: when WORLD_SIZE does not fit the layout.
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
        backend = "nccl"
        groups: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        add_gradients_in_products()
        norm_in_one_pass()
    else:
        device, backend, groups = torch.device("cpu"), "gloo", shared_groups()
        install_cpu_port()
    install_rotation()
    disable_cudnn_attention()
    for name, value in CUBLAS_WORKSPACE.items():  # for a later deterministic learner in this process
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
    """Switch cuDNN's attention off in this process.

    On Hopper torch prefers it in bf16, and it builds a plan for every new shape of a pack: 0.1 to 1.9 s each on an
    H100, against 1 ms for flash attention. Importing vLLM also switches it off, so that otherwise processes with and
    without vLLM would use different attention kernels.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def let_segments_grow() -> None:
    """Have torch hold this process's CUDA memory in segments that grow, unless the environment says how. Call it first.

    Packs differ in length: of segments as large as what was asked for first, much would lie idle. Not for a process
    whose memory others read through CUDA's handles, which torch need not have for such segments, nor for vLLM's, whose
    own pool excludes them.
    """
    if torch.cuda.is_available() and not any(name in os.environ for name in ALLOCATORS):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def returns_results() -> bool:
    """Whether this rank returns its data-parallel group's results: last stage, first tensor and context rank."""
    return (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def context_rank() -> ContextRank:
    """Return this rank's place among those that share its sequences."""
    group = parallel_state.get_context_parallel_group()
    return ContextRank(dist.get_rank(group), dist.get_world_size(group), group)


def group_of_writers() -> dist.ProcessGroup:
    """Return a group of all ranks over gloo, for threads that write beside the work. Collective, the first time."""
    global _writers
    if _writers is None:
        _writers = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return _writers


def shutdown() -> None:
    """Leave all groups."""
    global _writers
    _writers = None
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
