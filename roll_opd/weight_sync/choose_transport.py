"""Choose the transport of the student's weights to the engines: shared memory, CUDA IPC, NCCL or m2n."""

from collections.abc import Sequence

from roll_opd.inference.plugin import CUDA_IPC, M2N, NCCL, SHARED_MEMORY


def choose_backend(student: Sequence[int], engines: Sequence[int], wanted: str, *, on_gpu: bool) -> str:
    """Return the weight-transfer backend for a student and engines on the given devices.

    - What `wanted` states, a value of `weight_sync`.
    - CUDA IPC handles, if each device that an engine uses also has a student rank.
    - Otherwise an NCCL broadcast from student rank 0, if no engine uses the device of this rank. NCCL does not support
      two processes of one group on the same device.
    - Otherwise, or without GPUs, shared memory.
    """
    if not on_gpu or wanted == "shared_memory":
        return SHARED_MEMORY
    if wanted == "m2n":
        return M2N
    if set(engines) <= set(student):
        return CUDA_IPC
    return SHARED_MEMORY if student[0] in engines else NCCL
