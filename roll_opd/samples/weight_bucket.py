"""Buckets of named tensors in anonymous shared memory, with fingerprints that a reader verifies.

A bucket is a memfd, so it has no name in any file system. The kernel frees the memory when the last process that uses
the bucket exits, even if SIGKILL ends this process. Readers on the same machine map the bucket through
`/proc/<pid>/fd/<fd>`.
"""

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import cycle
from typing import Any

import numpy as np
import torch

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 64  # bytes; the size of a cache line, and more than any dtype needs
SAMPLED_ROWS = 4  # number of rows of a matrix that are sampled for its fingerprint
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# place of a bucket (`path`, `size`), and an entry for each of its `stacks` (see `entry_of`) with its `offset`; only
# builtin types, because it is sent to other processes
Description = dict[str, Any]
Sent = tuple[dict[str, Any], int]  # a sent tensor: entry of its stack, and its number in the stack


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
    """Return the checksums of some rows of a tensor.

    Args:
        rows: indices of the rows.
    """
    return checksums(tensor.detach()[rows].flatten(1)).tolist()


def checksums(rows: torch.Tensor) -> torch.Tensor:
    """Return the checksum of the bits of each row, i64 [...], for rows [..., values].

    A checksum is the sum of a row's words, each times an odd number of its place, modulo 2^64. So one word that differs
    always changes it, and the chance that another difference leaves it unchanged is about 2^-32. The rows of many
    tensors take a few operations together. A word has 64 bits, or as many as a value if the row's size is no multiple
    of 64 bits.
    """
    values = torch.int16 if rows.itemsize == 2 else torch.int32
    words = rows.contiguous().view(values if rows.shape[-1] * rows.itemsize % 8 else torch.int64)
    return (words * _multipliers(words.shape[-1]).to(words.device)).sum(-1)


@lru_cache(maxsize=32)
def _multipliers(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (length,), generator=generator, device="cpu") | 1


def fingerprint(tensors: torch.Tensor, model_dtype: torch.dtype) -> dict[str, list[list[int]]]:
    """Return a map from dtype names to the checksums of each sampled row, one checksum per tensor of a stack.

    The map has an entry for the dtype of the tensors and one for the dtype of the model. For each entry, the rows are
    converted to its dtype. A vector counts as one row. At most `SAMPLED_ROWS` rows of a matrix are read, to save time.
    """
    of_tensors = tensors.detach()
    picked = [of_tensors] if tensors.ndim == 2 else [of_tensors[:, row] for row in sampled_rows(tensors.shape[1])]
    rows = torch.stack(picked).flatten(2)
    return {dtype_name(dtype): checksums(rows.to(dtype)).tolist() for dtype in {tensors.dtype, model_dtype}}


def entry_of(names: Sequence[str], tensors: torch.Tensor, model_dtype: torch.dtype) -> dict[str, Any]:
    """Return the names, dtype, shape and fingerprint of the tensors of a stack, for readers.

    A stack has one entry, because objects for each tensor of a mixture of experts would take longer than its copy.
    Raises ValueError if the tensors have a shape or dtype that a weight cannot have, or another number than the names.
    """
    shape, dtype = list(tensors.shape[1:]), dtype_name(tensors.dtype)
    if tensors.numel() == 0 or not shape:
        raise ValueError(
            f"weight {names[0]!r} has shape {tuple(shape)}: expected at least one dimension, and no dimension of size 0"
        )
    if len(names) != len(tensors):
        raise ValueError(f"{len(names)} names for {len(tensors)} tensors of a stack, from {names[0]!r} on")
    found = fingerprint(tensors, model_dtype)
    return {"names": list(names), "dtype": dtype, "shape": shape, "fingerprint": found}


def sent_tensors(entries: Iterable[dict[str, Any]]) -> dict[str, Sent]:
    """Return the sent tensors by name."""
    return {name: (entry, number) for entry in entries for number, name in enumerate(entry["names"])}


def sent_checksums(sent: Sent, dtype: str) -> list[int] | None:
    """Return the checksum of each sampled row of a sent tensor in a dtype. None if the entry has no such dtype."""
    entry, number = sent
    rows = entry["fingerprint"].get(dtype)
    return rows and [of_tensors[number] for of_tensors in rows]


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

    def room(self, tensors: torch.Tensor, limit: int) -> int:
        """Return how many tensors of a stack fit into the bucket within `limit` bytes.

        An empty bucket has room for one tensor of any size.
        """
        free = limit - self.size - tensors[0].nbytes
        return max(1 + free // _stride(tensors[0].nbytes), 0 if self._entries else 1)

    def add(self, name: str, tensor: torch.Tensor, model_dtype: torch.dtype) -> None:
        """Copy a tensor into the bucket. The tensor may be fp32, bf16 or fp16, and on any device."""
        self.add_stack([name], tensor[None], model_dtype)

    def add_stack(self, names: Sequence[str], tensors: torch.Tensor, model_dtype: torch.dtype) -> None:
        """Copy the tensors of a stack into the bucket, each of them aligned."""
        entry = entry_of(names, tensors, model_dtype) | {"offset": self.size}
        end = self.size + _stride(tensors[0].nbytes) * len(names)
        if end > self._memory.numel():
            self._grow(end)
        _stacked(self._memory, entry).copy_(tensors.detach())
        self._entries.append(entry)
        self.size = end

    def fill(self, content: np.ndarray, description: Description) -> None:
        """Copy a bucket of another `BucketMemory` into this memory.

        Args:
            content: uint8 [size], the bytes of the other bucket.
            description: the result of `describe` for the other bucket.
        """
        if len(content) > self._memory.numel():
            self._grow(len(content))
        self._memory.numpy()[: len(content)] = content
        self._entries, self.size = description["stacks"], len(content)

    def content(self) -> np.ndarray:
        """Return the bucket's bytes, as a view uint8 [size]. The view is valid until the next bucket is written."""
        return self._memory.numpy()[: self.size]

    def describe(self) -> Description:
        """Return the arguments of `map_bucket`. Raises ValueError if the bucket is empty."""
        if not self._entries:
            raise ValueError("an empty weight bucket: every bucket of an update must hold at least one tensor")
        return {"path": f"/proc/{os.getpid()}/fd/{self._descriptor}", "size": self.size, "stacks": self._entries}

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


def _stride(size: int) -> int:
    """Return the bytes of a tensor of `size` bytes in a bucket, with the padding that aligns the next one."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _stacked(memory: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    """Return the tensors of a stack in a bucket, [tensors, ...], as a view of its memory, uint8 [size]."""
    dtype, shape, count = DTYPES[entry["dtype"]], entry["shape"], len(entry["names"])
    length = math.prod(shape)
    values = memory.narrow(0, entry["offset"], _stride(length * dtype.itemsize) * count).view(dtype).view(count, -1)
    return values[:, :length].unflatten(1, shape)


def bucketed(
    stacks: Iterable[tuple[Sequence[str], torch.Tensor]],
    memories: Sequence[BucketMemory],
    model_dtype: torch.dtype,
    limit: int,
) -> Iterator[tuple[BucketMemory, bool]]:
    """Write named tensors into buckets, and yield (bucket, whether it is the last one).

    If there are no tensors, no bucket is yielded. A bucket has at most `limit` bytes, but a tensor with more bytes gets
    its own bucket. The next bucket is written only when the caller requests it.

    Args:
        stacks: names of tensors of the same shape and dtype, and these tensors, stacked.
        memories: memories that are used for the buckets in turn.
        model_dtype: dtype of the models that load the tensors.
        limit: largest number of bytes of a bucket.
    """
    turns = cycle(memories)
    memory = None
    for names, tensors in stacks:
        start = 0
        while start < len(names):
            if memory is not None and not memory.room(tensors, limit):
                yield memory, False
                memory = None
            if memory is None:
                memory = next(turns)
                memory.clear()
            end = start + memory.room(tensors, limit)
            memory.add_stack(names[start:end], tensors[start:end], model_dtype)
            start = end
    if memory is not None:
        yield memory, True


def map_bucket(
    path: str, size: int, stacks: Iterable[dict[str, Any]]
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
    return memory, [pair for entry in stacks for pair in zip(entry["names"], _stacked(memory, entry), strict=True)]
