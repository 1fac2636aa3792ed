"""Sums over what is still to come in a sequence. Legend: M tokens of all sequences end to end, K action tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor


def discounted_to_go(values_M: Tensor, mask_M: Tensor, lengths: Sequence[int], discount: float) -> Tensor:
    """Return Σ_{k≥0} discount^k · the value of the k-th action token from here on, [M]; 0 off the mask.

    A discount is of one action token: text of a tool or an environment between two of them is no step.

    Args:
        values_M: what lies off the mask is not read.
        mask_M: bool, True at action tokens.
        lengths: tokens of each sequence, off the mask or not.
        discount: 0 returns the values themselves.
    """
    if discount == 0.0 or not len(values_M):
        return torch.where(mask_M, values_M, 0)
    if mask_M.all():  # nothing has to be picked out and put back
        return _to_go(values_M, torch.as_tensor(lengths, dtype=torch.int64), discount)
    total_M = torch.where(mask_M, values_M, 0)
    counts_B = torch.tensor([int(piece.count_nonzero()) for piece in mask_M.split(list(lengths))], dtype=torch.int64)
    total_M[mask_M] = _to_go(total_M[mask_M], counts_B, discount)
    return total_M


def turns_to_go(values_M: Tensor, mask_M: Tensor, acted_M: Tensor, lengths: Sequence[int], discount: float) -> Tensor:
    """Return Σ_{k≥0} discount^k · the sum of the values of the k-th turn from a token's own on, [M]; 0 off the mask.

    A turn is an unbroken stretch of action tokens, which all have one return: that of `discounted_to_go`, were a turn
    one token. What a mask leaves out of a turn adds no value, and does not make it two.

    Args:
        values_M: what lies off `mask_M` is not read.
        mask_M: bool, action tokens that count.
        acted_M: bool, all action tokens.
        lengths: tokens of each sequence, off the mask or not.
    """
    counted_M = torch.where(mask_M, values_M, 0)
    total_M = torch.zeros_like(counted_M)
    sequences = (piece.split(list(lengths)) for piece in (counted_M, acted_M, total_M))
    for counted, acted, total in zip(*sequences, strict=True):
        edges = torch.diff(acted.int(), prepend=acted.new_zeros(1).int(), append=acted.new_zeros(1).int())
        later = counted.new_zeros(())
        for begin, end in reversed(edges.nonzero().flatten().view(-1, 2).tolist()):
            later = counted[begin:end].sum() + discount * later
            total[begin:end] = later
    return torch.where(mask_M, total_M, 0)


def _to_go(values_K: Tensor, counts_B: Tensor, discount: float) -> Tensor:
    """In log2(longest) steps: a sum over the next 2n tokens is that over n, and the one n tokens on."""
    counts_B = counts_B[counts_B > 0].to(values_K.device)
    if not len(counts_B):
        return values_K
    ends_B = counts_B.cumsum(0)
    if discount == 1.0 and values_K.count_nonzero() == values_K[ends_B - 1].count_nonzero():
        total_K = torch.repeat_interleave(values_K[ends_B - 1] + 0.0, counts_B)  # a reward at the end, and no other
        total_K[ends_B - 1] = values_K[ends_B - 1]
        return total_K
    left_K = torch.repeat_interleave(ends_B, counts_B) - torch.arange(len(values_K), device=values_K.device)
    total_K, room_K, reach = values_K.clone(), torch.empty_like(values_K), 1
    while reach < int(counts_B.max()):
        ahead_K = room_K[reach:].copy_(total_K[reach:]).masked_fill_(left_K[:-reach] <= reach, 0)
        if discount != 1.0:
            ahead_K *= discount**reach
        total_K[:-reach] += ahead_K
        reach *= 2
    return total_K
