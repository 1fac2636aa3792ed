"""Generalised advantage estimation, and the value loss of a critic. arXiv 1506.02438, 1707.06347.

    δ_k = r_k + γ V_{k+1} - V_k        A_k = Σ_{i≥0} (γλ)^i δ_{k+i}        returns_k = A_k + V_k

k counts the action tokens of one sequence, as every discount does (see `returns`). V_k is the value of the state before
token k, and 0 after the last: a truncated sequence counts as terminated.

Legend: M scored tokens of all sequences end to end, K action tokens among them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from roll_opd.algorithms.returns import discounted_to_go


def gae(
    rewards_M: Tensor, values_M: Tensor, mask_M: Tensor, lengths: Sequence[int], gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Return advantages (not whitened) and returns, both f64 [M] and 0 off the mask.

    Args:
        rewards_M: token rewards, ignored off the mask.
        values_M: values of the state before each token, ignored off the mask.
        mask_M: bool, True at action tokens.
        lengths: M_b, tokens of each sequence.
        gamma: discount of one action token.
        lambd: 0 gives r + γV' - V, 1 the discounted return less V.
    """
    counts = torch.tensor([int(piece.sum()) for piece in mask_M.split(list(lengths))], dtype=torch.int64)
    rewards_K, values_K = rewards_M[mask_M].double(), values_M[mask_M].double()
    next_K = torch.zeros_like(values_K)
    next_K[:-1] = values_K[1:]
    ends = counts.to(values_K.device).cumsum(0) - 1
    next_K[ends[ends >= 0]] = 0.0
    errors_M = torch.zeros(len(mask_M), dtype=torch.float64, device=values_M.device)
    returns_M = torch.zeros_like(errors_M)
    errors_M[mask_M] = rewards_K + gamma * next_K - values_K
    advantages_M = discounted_to_go(errors_M, mask_M, lengths, gamma * lambd)
    returns_M[mask_M] = advantages_M[mask_M] + values_K
    return advantages_M, returns_M


def value_loss(values_M: Tensor, old_values_M: Tensor, returns_M: Tensor, clip: float | None = None) -> Tensor:
    """Return ½ (V - R)² per token, or with `clip` ½ max((V - R)², (V_clipped - R)²).

    V_clipped is V clipped to ±`clip` around the value before the update.
    """
    loss_M = (values_M - returns_M).square()
    if clip is not None:
        loss_M = torch.maximum(loss_M, (clipped_values(values_M, old_values_M, clip) - returns_M).square())
    return loss_M / 2


def clipped_values(values_M: Tensor, old_values_M: Tensor, clip: float) -> Tensor:
    """Return V, clipped to within ±`clip` of the value before the update."""
    return torch.minimum(torch.maximum(values_M, old_values_M - clip), old_values_M + clip)
