"""How Hugging Face's tensors lie in a Megatron parameter, cut over tensor ranks, and how they are joined again.

Each cut reads only this rank's part. Legend: R tensor ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """Whole tensors by Hugging Face's names, of which parts can be read."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return `name`, from `start` to `stop` of dimension `dim`, 0 or 1."""
        ...


@dataclass(frozen=True)
class Sizes:
    """What a cut needs to know of a model."""

    heads: int
    kv_heads: int
    vocab: int  # rows of the embedding; behind them is padding
    padded_vocab: int


class TensorSlice(Protocol):
    """`read` and `join` undo each other."""

    @property
    def dim(self) -> int | None:
        """The dimension that ranks share; None: each has the whole."""
        ...

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: Sizes, dim: int = 0) -> Tensor:
        """Return this rank's shares, one a name, as they lie in the parameter; its rows are their dimension `dim`."""
        ...

    def read(self, source: Source, names: Sequence[str], rank: int, ranks: int, sizes: Sizes) -> Tensor:
        """Return the parameter of tensor rank `rank` of `ranks`."""
        ...

    def join(self, shards: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        """Return the whole tensors, one a name, from the parameters of all ranks."""
        ...


class _OneName:
    """Of a parameter that is one tensor of Hugging Face's."""

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: Sizes, dim: int = 0) -> Tensor:
        return shares[0]


class Same(_OneName):
    """All ranks have the whole."""

    dim = None

    def read(self, source: Source, names: Sequence[str], rank: int, ranks: int, sizes: Sizes) -> Tensor:
        return _share(source, names[0], 0, 0, 1)

    def join(self, shards: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Split(_OneName):
    """Equal shares of dimension `dim`."""

    dim: int

    def read(self, source: Source, names: Sequence[str], rank: int, ranks: int, sizes: Sizes) -> Tensor:
        return _share(source, names[0], self.dim, rank, ranks)

    def join(self, shards: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        return [torch.cat(list(shards), self.dim)]


class Vocabulary(_OneName):
    """Equal shares of the rows, with rows of zeros behind the last one."""

    dim = 0

    def read(self, source: Source, names: Sequence[str], rank: int, ranks: int, sizes: Sizes) -> Tensor:
        stored, each = source.shape(names[0])[0], sizes.padded_vocab // ranks
        if stored != sizes.vocab:
            raise ValueError(
                f"{names[0]} has {stored} rows, config.json makes it {sizes.vocab}; get the model's own one"
            )
        first, last = (min(number * each, sizes.vocab) for number in (rank, rank + 1))
        rows = source.part(names[0], 0, first, last)
        return rows if len(rows) == each else torch.cat([rows, rows.new_zeros(each - len(rows), *rows.shape[1:])])

    def join(self, shards: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        return [torch.cat(list(shards))[: sizes.vocab]]


class Gated:
    """Two matrices of which each rank has its rows of the first, then its rows of the second."""

    dim = 0

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: Sizes, dim: int = 0) -> Tensor:
        return torch.cat(list(shares), dim)

    def read(self, source: Source, names: Sequence[str], rank: int, ranks: int, sizes: Sizes) -> Tensor:
        return self.arrange([_share(source, name, 0, rank, ranks) for name in names], ranks, sizes)

    def join(self, shards: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[which] for half in halves]) for which in range(2)]


class Heads:
    """Queries, keys and values, sorted by key/value head: its queries, its key, its value; each rank has its heads."""

    dim = 0

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: Sizes, dim: int = 0) -> Tensor:
        local = sizes.kv_heads // ranks
        return torch.cat([share.unflatten(dim, (local, -1)) for share in shares], dim + 1).flatten(dim, dim + 1)

    def read(self, source: Source, names: Sequence[str], rank: int, ranks: int, sizes: Sizes) -> Tensor:
        return self.arrange([_share(source, name, 0, rank, ranks) for name in names], ranks, sizes)

    def join(self, shards: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        by_head = torch.cat(list(shards)).unflatten(0, (sizes.kv_heads, -1))
        width = by_head.size(1) // (sizes.heads // sizes.kv_heads + 2)
        pieces = by_head.split([by_head.size(1) - 2 * width, width, width], 1)
        return [piece.flatten(0, 1) for piece in pieces]


def _share(source: Source, name: str, dim: int, rank: int, ranks: int) -> Tensor:
    size = source.shape(name)[dim]
    if size % ranks:
        raise ValueError(f"{name}: dimension {dim} has {size}, which {ranks} tensor ranks do not divide")
    return source.part(name, dim, rank * size // ranks, (rank + 1) * size // ranks)
