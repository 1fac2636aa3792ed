"""Context parallelism: splitting a pack's tokens over ranks, and gathering per-token results.

Each sequence is split into 2·C equal chunks. Rank r of C has chunks r and 2·C - 1 - r ("zigzag"), because this balances
the work of causal attention. A scored token is predicted on the rank that holds the hidden state before it; the token
itself may be on a different rank.

Legend: C context ranks, N packed tokens of all ranks, M scored tokens, m of them predicted by this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextRank:
    """Rank and size of a context-parallel group."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def multiple(self) -> int:
        """Sequence lengths are padded to a multiple of this number."""
        return 2 * self.ranks if self.ranks > 1 else 1


ALONE = ContextRank()


def zigzag(lengths: Sequence[int], ranks: int) -> np.ndarray:
    """Return the position of each token after the tokens are split over the ranks, int64 [N].

    A position is an index into the tokens of all ranks, concatenated in the order of the ranks. Each sequence length is
    a multiple of 2·ranks, so all ranks have the same number of tokens.
    """
    piece, start, places = sum(lengths) // ranks, 0, [np.zeros(0, np.int64)]
    for length in lengths:
        chunk = length // (2 * ranks)
        number, within = np.divmod(np.arange(length), max(chunk, 1))
        second = number >= ranks
        rank = np.where(second, 2 * ranks - 1 - number, number)
        places.append(rank * piece + start + second * chunk + within)
        start += 2 * chunk
    return np.concatenate(places)


@dataclass(frozen=True)
class TokenOwners:
    """For each of M scored tokens, the context rank that predicts the token."""

    owner_M: Tensor  # int64
    context: ContextRank

    @property
    def mine_M(self) -> Tensor:
        """Mask of the tokens predicted by this rank, bool [M]."""
        return self.owner_M == self.context.rank

    def at(self, rows_R: Tensor) -> "TokenOwners":
        """Return the owners of the R scored tokens with the indices `rows_R` (int64 [R])."""
        return replace(self, owner_M=self.owner_M[rows_R])

    def mine_among(self, rows_R: Tensor) -> Tensor:
        """Return the tokens of `rows_R` that this rank predicts, in the order of `rows_R`.

        A token is returned as its index among the m tokens that this rank predicts.
        """
        number_M = self.mine_M.cumsum(0) - 1
        return number_M[rows_R[self.mine_M[rows_R]]]

    def whole(self, values_m: Tensor) -> Tensor:
        """Gather the values of all ranks in token order, [M, ...]. Collective.

        Every rank gets all values, and all ranks compute the same loss from them. Each rank therefore has the complete
        gradient of its own values, and the backward pass needs no communication.
        """
        gathered: Tensor = _Gather.apply(values_m, self)
        return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_m: Tensor, owners: TokenOwners) -> Tensor:
        ctx.mine_M = owners.mine_M
        counts = torch.bincount(owners.owner_M, minlength=owners.context.ranks).tolist()
        padded = values_m.new_zeros(max(counts), *values_m.shape[1:])
        padded[: len(values_m)] = values_m
        gathered = [torch.empty_like(padded) for _ in counts]
        if max(counts):
            dist.all_gather(gathered, padded, group=owners.context.group)
        joined = values_m.new_empty(len(owners.owner_M), *values_m.shape[1:])
        for rank, (count, values) in enumerate(zip(counts, gathered, strict=True)):
            joined[owners.owner_M == rank] = values[:count]
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.mine_M], None
