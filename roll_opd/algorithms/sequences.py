"""Sums and means over each sequence of a pack, and the way back to its tokens.

Legend: M tokens of all sequences end to end, B sequences; `lengths` says how many tokens each sequence has.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_sums(values_M: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sum over each sequence, [B]; 0 for one without a token."""
    return values_M.new_zeros(len(lengths)).index_add(0, sequence_numbers(lengths, values_M.device), values_M)


def sequence_means(values_M: Tensor, mask_M: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean over the masked tokens of each sequence, [B]; 0 for one without any."""
    sums_B = sequence_sums(torch.where(mask_M, values_M, 0), lengths)
    return sums_B / sequence_sums(mask_M.to(values_M.dtype), lengths).clamp(min=1)


def on_tokens(values_B: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return for every token the value of its sequence, [M]."""
    return values_B[sequence_numbers(lengths, values_B.device)]


def sequence_numbers(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return which sequence each token belongs to, int64 [M]."""
    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(device)
