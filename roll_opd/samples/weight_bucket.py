"""Buckets of named tensors in anonymous shared memory, with fingerprints that a reader verifies.

A bucket is a memfd, so it has no name in any file system. The kernel frees the memory when the last process that uses
the bucket exits, even if SIGKILL ends this process. Readers on the same machine map the bucket through
`/proc/<pid>/fd/<fd>`.
"""

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 64  # bytes; the size of a cache line, and more than any dtype needs
SAMPLED_ROWS = 4  # number of rows of a matrix that are sampled for its fingerprint
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# place of a bucket (`path`, `size`), and name, dtype, shape, offset and fingerprint of each of its `tensors`; only
# builtin types, because it is sent to other processes
Description = dict[str, Any]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16".

    Raises ValueError if weights of this dtype cannot be transferred.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"weights of dtype {name} cannot be transferred; convert them to one of {', '.join(DTYPES)}")
    return name


def sampled_rows(rows: int) -> list[int]:
    """Return the indices of the rows that a fingerprint reads, in ascending order and without duplicates.

    They are the first row, the last row, and evenly spaced rows between them.

    Args:
        rows: number of rows of the matrix.
    """
    return sorted({round(i * (rows - 1) / (SAMPLED_ROWS - 1)) for i in range(SAMPLED_ROWS)})


def row_checksums(tensor: torch.Tensor, rows: list[int]) -> list[int]:
    """Return the CRC-32 of some rows of a tensor.

    Args:
        rows: indices of the rows.
    """
    picked = tensor.detach()[rows].cpu().contiguous()
    return [zlib.crc32(row.reshape(-1).view(torch.uint8).numpy()) for row in picked]


def fingerprint(tensor: torch.Tensor, model_dtype: torch.dtype) -> dict[str, list[int]]:
    """Return a map from dtype names to the CRC-32 of each sampled row of the tensor.

    The map has an entry for the dtype of the tensor and one for the dtype of the model. For each entry, the rows are
    converted to its dtype. A vector counts as one row. At most `SAMPLED_ROWS` rows of a matrix are read, to save time.
    """
    rows = tensor.detach().reshape(1, -1) if tensor.ndim == 1 else tensor.detach()
    picked = rows[sampled_rows(rows.shape[0])]
    everything = list(range(picked.shape[0]))
    return {dtype_name(d): row_checksums(picked.to(d), everything) for d in {tensor.dtype, model_dtype}}


def entry_of(name: str, tensor: torch.Tensor, model_dtype: torch.dtype) -> dict[str, Any]:
    """Return the description of a tensor for readers, without its offset.

    Raises ValueError if the tensor has a shape or dtype that a weight cannot have.
    """
    if tensor.numel() == 0 or tensor.ndim == 0:
        raise ValueError(
            f"weight {name!r} has shape {tuple(tensor.shape)}: expected at least one dimension, and no dimension"
            " of size 0"
        )
    shape, dtype = list(tensor.shape), dtype_name(tensor.dtype)
    return {"name": name, "dtype": dtype, "shape": shape, "fingerprint": fingerprint(tensor, model_dtype)}


class BucketMemory:
    """Memory that holds one bucket after the other. It grows to the size of the largest bucket.

    A reader must have finished with a bucket, or must have copied its content, before the next bucket is written.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("roll_opd-weights")
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._entries: list[dict[str, Any]] = []
        self.size = 0  # bytes of the bucket

    def clear(self) -> None:
        """Start an empty bucket."""
        self._entries, self.size = [], 0

    def has_room(self, tensor: torch.Tensor, limit: int) -> bool:
        """Return whether a tensor fits into the bucket within `limit` bytes.

        Any tensor fits into an empty bucket.
        """
        return not self._entries or self.size + tensor.nbytes <= limit

    def add(self, name: str, tensor: torch.Tensor, model_dtype: torch.dtype) -> None:
        """Copy a tensor into the bucket. The tensor may be fp32, bf16 or fp16, and on any device."""
        entry = entry_of(name, tensor, model_dtype)
        end = self.size + tensor.nbytes
        if end > self._memory.numel():
            self._grow(end)
        self._memory[self.size : end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self._entries.append({**entry, "offset": self.size})
        self.size = -(-end // ALIGNMENT) * ALIGNMENT

    def fill(self, content: np.ndarray, description: Description) -> None:
        """Copy a bucket of another `BucketMemory` into this memory.

        Args:
            content: uint8 [size], the bytes of the other bucket.
            description: the result of `describe` for the other bucket.
        """
        if len(content) > self._memory.numel():
            self._grow(len(content))
        self._memory.numpy()[: len(content)] = content
        self._entries, self.size = description["tensors"], len(content)

    def content(self) -> np.ndarray:
        """Return the bucket's bytes, as a view uint8 [size]. The view is valid until the next bucket is written."""
        return self._memory.numpy()[: self.size]

    def describe(self) -> Description:
        """Return the arguments of `map_bucket`. Raises ValueError if the bucket is empty."""
        if not self._entries:
            raise ValueError("an empty weight bucket: every bucket of an update must hold at least one tensor")
        return {"path": f"/proc/{os.getpid()}/fd/{self._descriptor}", "size": self.size, "tensors": self._entries}

    def close(self) -> None:
        """Release the memory. Processes that have mapped it keep their mappings."""
        if self._descriptor >= 0:
            self._memory = torch.empty(0, dtype=torch.uint8)
            os.close(self._descriptor)
            self._descriptor = -1

    def _grow(self, needed: int) -> None:
        size = -(-max(needed, 2 * self._memory.numel()) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._descriptor, size)  # ftruncate keeps the content
        self._memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)


def bucketed(
    tensors: Iterable[tuple[str, torch.Tensor]],
    memories: Sequence[BucketMemory],
    model_dtype: torch.dtype,
    limit: int,
) -> Iterator[tuple[BucketMemory, bool]]:
    """Write named tensors into buckets, and yield (bucket, whether it is the last one).

    If there are no tensors, no bucket is yielded. A bucket has at most `limit` bytes, but a tensor with more bytes gets
    its own bucket. The next bucket is written only when the caller requests it.

    Args:
        tensors: names and tensors.
        memories: memories that are used for the buckets in turn.
        model_dtype: dtype of the models that load the tensors.
        limit: largest number of bytes of a bucket.
    """
    turns = cycle(memories)
    memory = None
    for name, tensor in tensors:
        if memory is not None and not memory.has_room(tensor, limit):
            yield memory, False
            memory = None
        if memory is None:
            memory = next(turns)
            memory.clear()
        memory.add(name, tensor, model_dtype)
    if memory is not None:
        yield memory, True


def map_bucket(
    path: str, size: int, tensors: Iterable[dict[str, Any]]
) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """Return (memory, tensors) of a bucket. The tensors are views that keep the memory, uint8 [size], alive.

    The mapping is private, so other processes do not see writes to a tensor. Raises FileNotFoundError or
    PermissionError if the process that wrote the bucket is on another machine, has ended, or belongs to another user.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        memory = torch.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)
    return memory, [(entry["name"], _view(memory, entry)) for entry in tensors]


def _view(memory: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return memory[entry["offset"] : entry["offset"] + size].view(dtype).view(shape)
