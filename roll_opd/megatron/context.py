"""Context parallelism: how a pack is cut along its tokens, and how what was computed of the pieces is joined again.

Each sequence is cut into 2·C equal chunks, of which rank r of C has chunks r and 2·C - 1 - r ("zig-zag"): under a
causal mask all ranks then have equally much to attend to. Shift first, then cut: the state before a scored token may be
on another rank than the token, and belongs to the rank that has the state.

Legend: C context ranks, N packed tokens of all of them, M scored tokens, m of them that this rank predicts.
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
    """This rank's place among those that share its sequences."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def multiple(self) -> int:
        """Lengths of sequences are padded to a multiple of it."""
        return 2 * self.ranks if self.ranks > 1 else 1


ALONE = ContextRank()


def zigzag(lengths: Sequence[int], ranks: int) -> np.ndarray:
    """Return each token's place, int64 [N], when the pieces of rank 0, of rank 1 and so on stand end to end.

    `lengths` of the sequences are multiples of 2·ranks, so that all pieces are equally long.
    """
    piece, begun, places = sum(lengths) // ranks, 0, [np.zeros(0, np.int64)]
    for length in lengths:
        chunk = length // (2 * ranks)
        number, within = np.divmod(np.arange(length), max(chunk, 1))
        second = number >= ranks
        rank = np.where(second, 2 * ranks - 1 - number, number)
        places.append(rank * piece + begun + second * chunk + within)
        begun += 2 * chunk
    return np.concatenate(places)


@dataclass(frozen=True)
class TokenOwners:
    """Which rank predicts which of M scored tokens."""

    owner_M: Tensor  # int64
    context: ContextRank

    @property
    def mine_M(self) -> Tensor:
        """Whether a token is predicted here, bool [M]."""
        return self.owner_M == self.context.rank

    def at(self, rows_R: Tensor) -> "TokenOwners":
        """Return the cut of R of the M tokens, int64 [R]."""
        return replace(self, owner_M=self.owner_M[rows_R])

    def mine_among(self, rows_R: Tensor) -> Tensor:
        """Return the numbers, among the m tokens that are predicted here, of those that are of `rows_R`, in order."""
        number_M = self.mine_M.cumsum(0) - 1
        return number_M[rows_R[self.mine_M[rows_R]]]

    def whole(self, values_m: Tensor) -> Tensor:
        """Return [M, ...] of all ranks, in order, on each of them. Collective.

        Whatever follows is the same on all ranks, so the gradient of a rank's own values is complete on that rank.
        """
        joined: Tensor = _Joined.apply(values_m, self)
        return joined


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_m: Tensor, cut: TokenOwners) -> Tensor:
        ctx.mine_M = cut.mine_M
        counts = torch.bincount(cut.owner_M, minlength=cut.context.ranks).tolist()
        padded = values_m.new_zeros(max(counts), *values_m.shape[1:])
        padded[: len(values_m)] = values_m
        of_ranks = [torch.empty_like(padded) for _ in counts]
        if max(counts):
            dist.all_gather(of_ranks, padded, group=cut.context.group)
        joined = values_m.new_empty(len(cut.owner_M), *values_m.shape[1:])
        for rank, (count, values) in enumerate(zip(counts, of_ranks, strict=True)):
            joined[cut.owner_M == rank] = values[:count]
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.mine_M], None
