"""Sums and means per sequence of a pack, and expansion to tokens.

Legend: M tokens of all sequences, concatenated, B sequences; `lengths` has the number of tokens per sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_sums(values_M: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sum over each sequence, [B]; 0 for an empty one."""
    return values_M.new_zeros(len(lengths)).index_add(0, sequence_numbers(lengths, values_M.device), values_M)


def sequence_means(values_M: Tensor, mask_M: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean over the masked tokens of each sequence, [B]; 0 without any."""
    sums_B = sequence_sums(torch.where(mask_M, values_M, 0), lengths)
    return sums_B / sequence_sums(mask_M.to(values_M.dtype), lengths).clamp(min=1)


def on_tokens(values_B: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the value of each token's sequence, [M]."""
    return values_B[sequence_numbers(lengths, values_B.device)]


def sequence_numbers(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the sequence number of each token, int64 [M]."""
    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(device)
