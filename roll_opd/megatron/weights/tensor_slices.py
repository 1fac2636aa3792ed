"""Slicing of Hugging Face tensors over tensor ranks. Each rank reads only its slices.

A rank arranges its slices into a Megatron parameter. The parameters of all ranks can be joined to the full tensors. Of
Gated DeltaNet and gated attention, key heads are split equally over the ranks, and each rank also has the value heads
that belong to its key heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from roll_opd.models.families.family_definition import Slicing
from roll_opd.models.families.qwen_hybrid import DeltaSizes


class SliceSource(Protocol):
    """Source of full tensors by Hugging Face name, from which slices can be read."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        ...

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return a slice of tensor `name`, from `start` to `stop` along dimension `dim`.

        `dim`: 0 or 1.
        """
        ...


@dataclass(frozen=True)
class SliceSizes:
    """Sizes of a model that determine how its tensors are sliced."""

    heads: int
    kv_heads: int
    vocab: int  # rows of the embedding without padding
    padded_vocab: int
    delta: DeltaSizes | None = None  # None: no Gated DeltaNet layers


class TensorSlice(Protocol):
    """Slicing of one parameter.

    `read` makes the parameter of one rank from Hugging Face tensors. `join` is its inverse over all ranks.
    """

    @property
    def dim(self) -> int | None:
        """Sharded dimension, or None if the parameter is replicated."""
        ...

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: SliceSizes, dim: int = 0) -> Tensor:
        """Join this rank's slices into the parameter.

        Args:
            shares: one slice per Hugging Face tensor.
            dim: the dimension of the parameter's rows.
        """
        ...

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        """Read the parameter of tensor rank `rank` from Hugging Face tensors.

        `ranks`: number of tensor ranks.
        """
        ...

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        """Return the full Hugging Face tensors, one per name, from the parameters of all ranks."""
        ...


class _SingleTensor:
    """Base class of slicings in which a parameter corresponds to a single Hugging Face tensor."""

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: SliceSizes, dim: int = 0) -> Tensor:
        return shares[0]


class Replicated(_SingleTensor):
    """Slicing of a parameter that is replicated on all ranks."""

    dim = None

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        return _share(source, names[0], 0, 0, 1)

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Split(_SingleTensor):
    """Slicing into equal parts along dimension `dim`."""

    dim: int

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        return _share(source, names[0], self.dim, rank, ranks)

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        return [torch.cat(list(shards), self.dim)]


class VocabRows(_SingleTensor):
    """Slicing of vocabulary rows, which are padded with zeros and split into equal parts."""

    dim = 0

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        stored, each = source.shape(names[0])[0], sizes.padded_vocab // ranks
        if stored != sizes.vocab:
            raise ValueError(
                f"{names[0]} has {stored} rows, but vocab_size in config.json is {sizes.vocab};"
                " use the model's config.json"
            )
        first, last = (min(number * each, sizes.vocab) for number in (rank, rank + 1))
        rows = source.part(names[0], 0, first, last)
        return rows if len(rows) == each else torch.cat([rows, rows.new_zeros(each - len(rows), *rows.shape[1:])])

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        return [torch.cat(list(shards))[: sizes.vocab]]


class GateUp:
    """Gate and up matrices: each rank has its rows of the gate matrix, then its rows of the up matrix."""

    dim = 0

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: SliceSizes, dim: int = 0) -> Tensor:
        return torch.cat(list(shares), dim)

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        return self.arrange([_share(source, name, 0, rank, ranks) for name in names], ranks, sizes)

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[which] for half in halves]) for which in range(2)]


@dataclass(frozen=True)
class Transposed(_SingleTensor):
    """Slicing of a parameter that is the transpose of a Hugging Face tensor.

    The parameter is split along its dimension `dim`. A tensor with one dimension is split but not transposed.
    """

    dim: int

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        is_vector = len(source.shape(names[0])) == 1
        return _transposed(_share(source, names[0], 0 if is_vector else 1 - self.dim, rank, ranks))

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        return [_transposed(torch.cat(list(shards), self.dim))]


class InterleavedGateUp(Transposed):
    """Gate and up matrices in one transposed tensor, with alternating columns.

    Their biases alternate in the same way.
    """

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        both = super().read(source, names, rank, ranks, sizes)
        return torch.cat([both[::2], both[1::2]])

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        return super().join([torch.stack(shard.chunk(2), 1).flatten(0, 1) for shard in shards], sizes)


class QKV:
    """Queries, keys and values. The key/value heads are split over the tensor ranks.

    The parameter is grouped by key/value head. Each group has the queries, the key and the value of the head.
    """

    dim = 0

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: SliceSizes, dim: int = 0) -> Tensor:
        local = sizes.kv_heads // ranks
        return torch.cat([share.unflatten(dim, (local, -1)) for share in shares], dim + 1).flatten(dim, dim + 1)

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        return self.arrange([_share(source, name, 0, rank, ranks) for name in names], ranks, sizes)

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        by_head = torch.cat(list(shards)).unflatten(0, (sizes.kv_heads, -1))
        width = by_head.size(1) // (sizes.heads // sizes.kv_heads + 2)
        pieces = by_head.split([by_head.size(1) - 2 * width, width, width], 1)
        return [piece.flatten(0, 1) for piece in pieces]


class _Parts:
    """Base class of slicings in which one Hugging Face tensor consists of several fused parts."""

    dim = 0

    def parts(self, rows: int, sizes: SliceSizes) -> list[int]:
        """Return the number of rows of each part. Subclasses must define this method."""
        raise NotImplementedError(f"{type(self).__name__} has no method `parts`")

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: SliceSizes, dim: int = 0) -> Tensor:
        raise ValueError("LoRA adapters are not supported for fused layers")

    def _shares(self, source: SliceSource, name: str, rank: int, ranks: int, sizes: SliceSizes) -> list[Tensor]:
        found, start = [], 0
        for size in self.parts(source.shape(name)[0], sizes):
            _check_divides(name, 0, size, ranks)
            found.append(source.part(name, 0, start + rank * size // ranks, start + (rank + 1) * size // ranks))
            start += size
        return found


class FusedGateUp(_Parts):
    """Gate and up matrices in one tensor."""

    def parts(self, rows: int, sizes: SliceSizes) -> list[int]:
        return [rows // 2, rows // 2]

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        return torch.cat(self._shares(source, names[0], rank, ranks, sizes))

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        return [torch.cat(GateUp().join(shards, sizes))]


class FusedQKV(_Parts):
    """One tensor with the queries of all heads, then the keys of all heads, then the values of all heads."""

    def parts(self, rows: int, sizes: SliceSizes) -> list[int]:
        each = rows // (sizes.heads + 2 * sizes.kv_heads)
        return [sizes.heads * each, sizes.kv_heads * each, sizes.kv_heads * each]

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        return QKV().arrange(self._shares(source, names[0], rank, ranks, sizes), ranks, sizes)

    def join(self, shards: Sequence[Tensor], sizes: SliceSizes) -> list[Tensor]:
        return [torch.cat(QKV().join(shards, sizes))]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 1 else tensor.T.contiguous()


def _share(source: SliceSource, name: str, dim: int, rank: int, ranks: int) -> Tensor:
    size = source.shape(name)[dim]
    _check_divides(name, dim, size, ranks)
    return source.part(name, dim, rank * size // ranks, (rank + 1) * size // ranks)


def _check_divides(name: str, dim: int, size: int, ranks: int) -> None:
    if size % ranks:
        raise ValueError(
            f"{name}: dimension {dim} of size {size} is not divisible by {ranks} tensor ranks; use fewer ranks"
        )


TENSOR_SLICINGS: Mapping[Slicing, TensorSlice] = {
    "replicated": Replicated(),
    "rows": Split(0),
    "columns": Split(1),
    "vocabulary": VocabRows(),
    "qkv": QKV(),
    "gate_up": GateUp(),
    "fused_qkv": FusedQKV(),
    "fused_gate_up": FusedGateUp(),
    "interleaved_gate_up": InterleavedGateUp(0),
    "transposed_columns": Transposed(1),
}


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
        """Return the height of each section in rows of one key head, as one list for each tensor."""
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
