"""`WeightBucket`, the currency of a weight update: from the trainer to every inference engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; a view of any dtype needs an aligned offset


@dataclass(frozen=True)
class WeightBucket:
    """Some named tensors in one flat buffer, which travels between processes without a copy."""

    entries: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, torch dtype name, shape, byte offset
    buffer: np.ndarray  # uint8

    @classmethod
    def of(cls, named: Sequence[tuple[str, Tensor]]) -> "WeightBucket":
        """Copy contiguous CPU tensors into a bucket."""
        entries, pieces, offset = [], [], 0
        for name, tensor in named:
            raw = tensor.flatten().view(torch.uint8).numpy()
            entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            padding = -raw.nbytes % _ALIGNMENT
            pieces += [raw, np.zeros(padding, np.uint8)]
            offset += raw.nbytes + padding
        return cls(tuple(entries), np.concatenate(pieces))

    def tensors(self) -> dict[str, Tensor]:
        """Views into the buffer, by name. Not to be written to: the buffer may be shared memory."""
        flat = torch.from_numpy(self.buffer)
        result = {}
        for name, dtype_name, shape, offset in self.entries:
            dtype = getattr(torch, dtype_name)
            count = int(np.prod(shape)) * dtype.itemsize
            result[name] = flat[offset : offset + count].view(dtype).view(shape)
        return result
