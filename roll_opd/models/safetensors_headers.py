"""Read the headers of safetensors files, and sample bytes of their tensors to compare weights."""

import json
import math
import operator
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_opd.models.json_files import ModelFilesError, is_pointer, pointer_sentence

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
PIECES, PIECE_BYTES = 16, 4096  # of a tensor, to compare


@dataclass(frozen=True)
class StoredTensor:
    """Header entry of a tensor: file, dtype, shape and byte range."""

    file: Path
    dtype: str  # the format's name, such as BF16
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    end: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the header entry of each tensor by name. Raises ModelFilesError for a damaged file."""
    with file.open("rb") as stream:
        start = stream.read(8)
        if not start:
            raise ModelFilesError(f"{file.name} is empty (0 bytes); download it again")
        if is_pointer(file):
            raise ModelFilesError(pointer_sentence(file))
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ModelFilesError(f"{file.name} is not a safetensors file, or is truncated; download it again")
        try:
            tensors = {
                name: _stored_tensor(file, value, 8 + size)
                for name, value in json.loads(stream.read(size)).items()
                if name != "__metadata__"
            }
            if not 0 <= sum(math.prod(tensor.shape) for tensor in tensors.values()) < 2**63:
                raise ValueError("too many weights")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
            raise ModelFilesError(f"{file.name} has a damaged header; download it again") from None
    needed = max((tensor.end for tensor in tensors.values()), default=8 + size)
    size = file.stat().st_size
    if size != needed:
        what = "is truncated" if size < needed else "has bytes after its last tensor"
        raise ModelFilesError(f"{file.name} {what}: {size} of {needed} bytes; download it again")
    return tensors


def _stored_tensor(file: Path, value: dict[str, Any], data: int) -> StoredTensor:
    start, end = value["data_offsets"]
    return StoredTensor(file, str(value["dtype"]), tuple(map(operator.index, value["shape"])), data + start, data + end)


def differ(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors of equal shape and dtype differ in the sampled pieces."""
    return one.dtype == other.dtype and any(
        left != right for left, right in zip(pieces(one), pieces(other), strict=True)
    )


def pieces(tensor: StoredTensor, count: int = PIECES) -> list[bytes]:
    """Return up to `count` pieces spread over a tensor, from its first to its last byte."""
    size = tensor.end - tensor.start
    last, count = max(0, size - PIECE_BYTES), min(count, -(-size // PIECE_BYTES))
    with tensor.file.open("rb") as stream:
        found = []
        for piece in range(count):
            place = last * piece // max(1, count - 1)
            stream.seek(tensor.start + place - place % 8)  # aligned, so that no number is split
            found.append(stream.read(min(PIECE_BYTES, size)))
        return found
