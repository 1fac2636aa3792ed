"""Slicing of the tensors of Gated DeltaNet and of gated attention over tensor ranks (see `tensor_slices`).

Key heads are split equally over the ranks. Each rank also has the value heads that belong to its key heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_opd.megatron.weights.tensor_slices import QKV, SliceSizes, SliceSource, TensorSlice
from roll_opd.models.families.family import Slicing

Sections = tuple[tuple[int, ...], ...]  # for each section of a tensor's rows: indices in `DeltaSizes.of_key_head`


class _WithoutAdapters:
    dim = 0

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: SliceSizes, dim: int = 0) -> Tensor:
        raise ValueError("LoRA adapters are not supported for Gated DeltaNet and gated attention")


@dataclass(frozen=True)
class KeyHeadRows(_WithoutAdapters):
    """Rows of the input projection, grouped by key head.

    Each tensor is divided into sections along its rows.
    """

    tensors: tuple[Sections, ...]

    def _widths(self, sizes: SliceSizes) -> list[list[int]]:
        """Return the number of rows per key head, for each tensor and each of its sections."""
        assert sizes.delta is not None
        rows = sizes.delta.of_key_head
        return [[sum(rows[part] for part in section) for section in sections] for sections in self.tensors]

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        assert sizes.delta is not None
        heads = sizes.delta.key_heads
        pieces = []
        for name, widths in zip(names, self._widths(sizes), strict=True):
            for piece in _sections(source, name, [heads * width for width in widths], rank, ranks):
                pieces.append(piece.unflatten(0, (heads // ranks, -1)))
        return torch.cat(pieces, 1).flatten(0, 1)

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        assert sizes.delta is not None
        widths = self._widths(sizes)
        by_head = torch.cat(list(shards)).unflatten(0, (sizes.delta.key_heads, -1))
        pieces = iter(by_head.split([width for tensor in widths for width in tensor], 1))
        return [torch.cat([next(pieces).flatten(0, 1) for _ in tensor]) for tensor in widths]


class DeltaChannels(KeyHeadRows):
    """Channels of the convolution for queries, keys and values, grouped by key head.

    The Hugging Face tensor has the shape [channels, 1, taps].
    """

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        return super().read(source, names, rank, ranks, sizes).flatten(1)

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        return [tensor[:, None] for tensor in super().join(shards, sizes)]


class GatedQKV(_WithoutAdapters):
    """Queries, output gates, keys and values, grouped by key/value head.

    The first tensor contains the query and the gate of each head.
    """

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        queries, keys, values = (_sections(source, name, [source.shape(name)[0]], rank, ranks)[0] for name in names)
        local, each = sizes.kv_heads // ranks, sizes.heads // sizes.kv_heads
        grouped = queries.unflatten(0, (local, each, 2, -1)).transpose(1, 2).flatten(0, 3)
        return QKV().arrange([grouped, keys, values], ranks, sizes)

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        each = sizes.heads // sizes.kv_heads
        by_head = torch.cat(list(shards)).unflatten(0, (sizes.kv_heads, 2 * each + 2, -1))
        queries, keys, values = by_head.split([2 * each, 1, 1], 1)
        queries = queries.unflatten(1, (2, each)).transpose(1, 2)
        return [queries.flatten(0, 3), keys.flatten(0, 2), values.flatten(0, 2)]


def _sections(source: SliceSource, name: str, rows: Sequence[int], rank: int, ranks: int) -> list[Tensor]:
    """Return this rank's part of each section of a tensor.

    `rows`: number of rows of each section.
    """
    found, start = [], 0
    if sum(rows) != source.shape(name)[0] or any(size % ranks for size in rows):
        raise ValueError(
            f"{name}: {source.shape(name)[0]} rows, but config.json implies {' + '.join(map(str, rows))}, and each of"
            f" these numbers must be divisible by {ranks} tensor ranks; use the config.json of the same release, or"
            " fewer ranks"
        )
    for size in rows:
        found.append(source.part(name, 0, start + rank * size // ranks, start + (rank + 1) * size // ranks))
        start += size
    return found


# name in `models.families` -> slicing; delta_key_heads: in_proj_qkvz and in_proj_ba of Qwen3-Next; delta_parts:
# in_proj_qkv, in_proj_z, in_proj_b and in_proj_a of Qwen3.5
DELTA_SLICINGS: Mapping[Slicing, TensorSlice] = {
    "gated_qkv": GatedQKV(),
    "delta_key_heads": KeyHeadRows((((0, 1, 2, 3),), ((4, 5),))),
    "delta_parts": KeyHeadRows((((0,), (1,), (2,)), ((3,),), ((4,),), ((5,),))),
    "delta_channels": DeltaChannels((((0,), (1,), (2,)),)),
}
