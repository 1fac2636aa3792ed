"""Buckets of named tensors in anonymous shared memory, and fingerprints by which a reader checks that they arrived.

The writer puts a bucket into a memfd, which has no name in any file system: the memory is freed when its last user
ends, by whatever signal. Readers on the same machine map it through `/proc/<pid>/fd/<fd>`.
"""

import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs
SAMPLED_ROWS = 4  # rows of a matrix that enter its fingerprint
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for `torch.bfloat16`; ValueError for a dtype that weights cannot have."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"weights of dtype {name} cannot be transferred; convert them to one of {', '.join(DTYPES)}")
    return name


def sampled_rows(rows: int) -> list[int]:
    """Return the rows that a fingerprint reads: first, last and evenly spread between; sorted, unique."""
    return sorted({round(i * (rows - 1) / (SAMPLED_ROWS - 1)) for i in range(SAMPLED_ROWS)})


def row_checksums(tensor: torch.Tensor, rows: list[int]) -> list[int]:
    """Return the CRC-32 of the bytes of each of the given rows of a [rows, ...] tensor."""
    picked = tensor.detach()[rows].cpu().contiguous()
    return [zlib.crc32(row.reshape(-1).view(torch.uint8).numpy()) for row in picked]


def fingerprint(tensor: torch.Tensor, model_dtype: torch.dtype) -> dict[str, list[int]]:
    """Return checksums as sent and, in another dtype, as the model will hold it: dtype name -> CRC-32 of each row read.

    A vector is one row. To be cheap, at most `SAMPLED_ROWS` rows of a matrix are read.
    """
    rows = tensor.detach().reshape(1, -1) if tensor.ndim == 1 else tensor.detach()
    picked = rows[sampled_rows(rows.shape[0])]
    everything = list(range(picked.shape[0]))
    return {dtype_name(d): row_checksums(picked.to(d), everything) for d in {tensor.dtype, model_dtype}}


@contextmanager
def shared_bucket(
    tensors: Mapping[str, np.ndarray | torch.Tensor], model_dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Write named tensors (fp32, bf16 or fp16; any device) into shared memory and yield where they are.

    The value is made of builtins only (`path`, `size`, and per tensor `name`, `dtype`, `shape`, `offset`,
    `fingerprint`) and is what `map_bucket` takes. On exit the writer closes it; a process that has mapped it keeps it.
    """
    sources = {name: _as_cpu_tensor(tensor) for name, tensor in tensors.items()}
    entries, size = _lay_out(sources)
    if not entries:
        raise ValueError("an empty weight bucket: every bucket of an update must hold at least one tensor")
    descriptor = os.memfd_create("roll_opd-weights")
    try:
        os.ftruncate(descriptor, size)
        memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        for entry, source in zip(entries, sources.values(), strict=True):
            entry["fingerprint"] = fingerprint(source, model_dtype)
            flat = source.reshape(-1).view(torch.uint8)
            memory[entry["offset"] : entry["offset"] + flat.numel()].copy_(flat)
        del memory
        yield {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "size": size, "tensors": entries}
    finally:
        os.close(descriptor)


def map_bucket(path: str, size: int, tensors: list[dict[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that `shared_bucket` described, without a copy; the memory lives as long as one of them does.

    The mapping is private: writing to a tensor changes no other process's view. FileNotFoundError or
    PermissionError where the writer is not on this machine, is gone, or belongs to another user.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return [(entry["name"], _view(memory, entry)) for entry in tensors]


def _view(memory: mmap.mmap, entry: dict[str, Any]) -> torch.Tensor:
    shape = entry["shape"]
    count = int(np.prod(shape, dtype=np.int64))
    flat = torch.frombuffer(memory, dtype=DTYPES[entry["dtype"]], count=count, offset=entry["offset"])
    return flat.reshape(shape)


def _as_cpu_tensor(tensor: np.ndarray | torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, np.ndarray):
        tensor = torch.from_numpy(tensor if tensor.flags.writeable else tensor.copy())
    return tensor.detach().cpu().contiguous()


def _lay_out(sources: Mapping[str, torch.Tensor]) -> tuple[list[dict[str, Any]], int]:
    entries: list[dict[str, Any]] = []
    offset = 0
    for name, tensor in sources.items():
        if tensor.numel() == 0 or tensor.ndim == 0:
            raise ValueError(
                f"weight {name!r} has shape {tuple(tensor.shape)}: expected at least one dimension, none 0"
            )
        entries.append({"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "offset": offset})
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return entries, offset
