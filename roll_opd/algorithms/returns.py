"""Sums over what is still to come in a sequence. Legend: M tokens of all sequences end to end, B sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor


def discounted_to_go(values_M: Tensor, lengths: Sequence[int], discount: float) -> Tensor:
    """Return Σ_{k≥0} discount^k · values_{t+k} within each sequence, [M]. `discount` 0 returns `values_M`.

    In log2(longest) steps: a sum over the next 2n tokens is that over n, and the one n tokens on.
    """
    if discount == 0.0 or not len(values_M):
        return values_M
    left_M = torch.cat([torch.arange(length, 0, -1) for length in lengths]).to(values_M.device)
    total_M, reach = values_M, 1
    while reach < max(lengths):
        ahead_M = torch.zeros_like(total_M)
        ahead_M[:-reach] = total_M[reach:]
        total_M = total_M + discount**reach * torch.where(left_M > reach, ahead_M, 0)
        reach *= 2
    return total_M
