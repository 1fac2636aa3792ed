"""How tensors travel between processes: one as a numpy array, or many as a `WeightBucket`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; a view of any dtype needs an aligned offset


def as_array(tensor: Tensor) -> np.ndarray:
    """Return `tensor`, from any device and without its gradient, as an array of the same shape.

    numpy has no bf16: it travels as int16, which nothing else here uses.
    """
    tensor = tensor.detach().cpu()
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def as_tensor(array: np.ndarray) -> Tensor:
    """Return what `as_array` was given, on the CPU."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.int16 else tensor


@dataclass(frozen=True)
class WeightBucket:
    """Some named weights in one flat buffer, which travels to every inference engine without a copy."""

    entries: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, torch dtype name, shape, byte offset
    buffer: np.ndarray  # uint8

    @classmethod
    def of(cls, named: Sequence[tuple[str, Tensor]]) -> "WeightBucket":
        """Copy contiguous CPU tensors into a bucket."""
        entries: list[tuple[str, str, tuple[int, ...], int]] = []
        pieces: list[np.ndarray] = []
        offset = 0
        for name, tensor in named:
            raw = tensor.flatten().view(torch.uint8).numpy()
            entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            padding = -raw.nbytes % _ALIGNMENT
            pieces += [raw, np.zeros(padding, np.uint8)]
            offset += raw.nbytes + padding
        return cls(tuple(entries), np.concatenate(pieces))

    def tensors(self) -> dict[str, Tensor]:
        """Return views into the buffer, by name. Do not write to them: the buffer may be shared memory."""
        flat = torch.from_numpy(self.buffer)
        result = {}
        for name, dtype_name, shape, offset in self.entries:
            dtype = getattr(torch, dtype_name)
            count = int(np.prod(shape)) * dtype.itemsize
            result[name] = flat[offset : offset + count].view(dtype).view(shape)
        return result
