"""Compute token advantages from normalised rewards: returns-to-go or GAE, optionally whitened.

    A = whiten(Σ_k γ^k r_{t+k}); with a critic: A = whiten(GAE of r)
    r = whiten(R' on the last action token, 0 elsewhere, minus a penalty per token)

k counts action tokens, or turns if gamma is applied per turn. R' is the normalised reward of an advantage function (see
`advantages`). Whitening, discount and penalty are optional.

`objective.reverse_kl` adds the teachers' term later, because whitening the sum would remove the signal of this term.
The sum is then clipped.

GAE:

    δ_k = r_k + γ V_{k+1} - V_k        A_k = Σ_{i≥0} (γλ)^i δ_{k+i}        returns_k = A_k + V_k

k is the index of an action token in its sequence, and V_k is the value of the state before token k. All discounts are
per action token. The value after the last token is 0, so a truncated sequence is treated as terminated. arXiv
1506.02438, 1707.06347.

Legend: B samples with M scored tokens in total, concatenated. K of these M tokens are action tokens. Token advantages
are float64, because they are small and tests compare six digits of long sums.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def discounted_to_go(values_M: Tensor, mask_M: Tensor, lengths: Sequence[int], discount: float) -> Tensor:
    """Return the discounted sum of the current and later values for each action token, [M]; 0 elsewhere.

    The sum is Σ_{k≥0} discount^k · v_k, where v_k is the value of the action token k places later. The discount is per
    action token, so tokens of tools and environments between action tokens do not count.

    Args:
        values_M: value of each token; ignored outside the mask.
        mask_M: bool, True at action tokens.
        lengths: number of tokens of each sequence, inside and outside the mask.
        discount: discount per action token. With 0, the result is the values themselves.
    """
    if discount == 0.0 or not len(values_M):
        return torch.where(mask_M, values_M, 0)
    if mask_M.all():  # faster, as it needs no indexing
        return _to_go(values_M, torch.as_tensor(lengths, dtype=torch.int64), discount)
    total_M = torch.where(mask_M, values_M, 0)
    counts_B = torch.tensor([int(piece.count_nonzero()) for piece in mask_M.split(list(lengths))], dtype=torch.int64)
    total_M[mask_M] = _to_go(total_M[mask_M], counts_B, discount)
    return total_M


def turns_to_go(values_M: Tensor, mask_M: Tensor, acted_M: Tensor, lengths: Sequence[int], discount: float) -> Tensor:
    """Return the discounted sum of the values of the current and later turns for each token, [M]; 0 outside the mask.

    The sum is Σ_{k≥0} discount^k · v_k, where v_k is the sum of the values in the turn k turns later. A turn is a
    contiguous span of action tokens. All tokens of a turn get the same result. Tokens of a turn that are outside
    `mask_M` add no value, and do not split the turn.

    Args:
        values_M: value of each token; ignored outside `mask_M`.
        mask_M: bool, True at action tokens in the loss.
        acted_M: bool, True at all action tokens.
        lengths: number of tokens of each sequence, inside and outside the mask.
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
    """Return the discounted sums in log2(longest) iterations.

    An iteration adds two sums over n tokens to get a sum over 2n tokens.
    """
    counts_B = counts_B[counts_B > 0].to(values_K.device)
    if not len(counts_B):
        return values_K
    ends_B = counts_B.cumsum(0)
    if discount == 1.0 and values_K.count_nonzero() == values_K[ends_B - 1].count_nonzero():
        total_K = torch.repeat_interleave(
            values_K[ends_B - 1] + 0.0, counts_B
        )  # faster, for a single reward at the end
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


def gae(
    rewards_M: Tensor, values_M: Tensor, mask_M: Tensor, lengths: Sequence[int], gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), both f64 [M] and 0 outside the mask. The advantages are not whitened.

    Args:
        rewards_M: token rewards; ignored outside the mask.
        values_M: values of the state before each token; ignored outside the mask.
        mask_M: bool, True at action tokens.
        lengths: number of tokens of each sequence.
        gamma: discount factor per action token.
        lambd: λ of GAE. With 0, the advantage is r + γV' - V. With 1, it is the discounted return minus V.
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
    """Return ½ (V - R)² of each token. If `clip` is set, return ½ max((V - R)², (V_clipped - R)²) instead.

    V_clipped is V, clipped to within ±`clip` of the value before the update.
    """
    loss_M = (values_M - returns_M).square()
    if clip is not None:
        loss_M = torch.maximum(loss_M, (clipped_values(values_M, old_values_M, clip) - returns_M).square())
    return loss_M / 2


def clipped_values(values_M: Tensor, old_values_M: Tensor, clip: float) -> Tensor:
    """Return V, clipped to within ±`clip` of the value before the update."""
    return torch.minimum(torch.maximum(values_M, old_values_M - clip), old_values_M + clip)


VARIANCE_FLOOR = 1e-8  # added to the variance in whitening


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages and returns, both f64 [M] and 0 outside the mask. The returns are the targets of a critic.

    `reward_mean` and `reward_scale` are the mean and the scale that whitened the rewards. `mean` and `scale` are those
    that whitened the advantages. Without whitening, the mean is 0 and the scale is 1.
    """

    advantages_M: Tensor
    returns_M: Tensor
    reward_mean: float
    reward_scale: float
    mean: float
    scale: float


def token_advantages(
    rewards_M: Tensor,
    mask_M: Tensor,
    lengths: Sequence[int],
    *,
    gamma: float = 1.0,
    values_M: Tensor | None = None,
    lambd: float = 0.95,
    turns_M: Tensor | None = None,
    whiten_rewards: bool = False,
    whiten_advantages: bool = False,
) -> TokenAdvantages:
    """Compute advantages from token rewards.

    The advantages are discounted returns-to-go. If a critic's values are given, they are GAE instead. The rewards and
    the advantages can be whitened (arXiv 2501.03262).

    Args:
        rewards_M: f64 [M], 0 outside the mask.
        mask_M: bool [M].
        lengths: number of tokens of each sample.
        gamma: discount factor.
        values_M: a critic's values of the state before each token; None: returns-to-go.
        lambd: λ of GAE.
        turns_M: bool [M], True at action tokens: gamma is applied per turn. A turn is an unbroken run of action tokens.
            None: gamma is applied per token.
    """
    rewards_M, reward_mean, reward_scale = _whitened(rewards_M, mask_M, enabled=whiten_rewards)
    if values_M is not None:
        advantages_M, returns_M = gae(rewards_M, values_M, mask_M, lengths, gamma, lambd)
    elif turns_M is not None:
        advantages_M = returns_M = turns_to_go(rewards_M, mask_M, turns_M, lengths, gamma)
    else:
        advantages_M = returns_M = discounted_to_go(rewards_M, mask_M, lengths, gamma)
    advantages_M, mean, scale = _whitened(advantages_M, mask_M, enabled=whiten_advantages)
    return TokenAdvantages(advantages_M, returns_M, reward_mean, reward_scale, mean, scale)


def _whitened(values_M: Tensor, mask_M: Tensor, *, enabled: bool) -> tuple[Tensor, float, float]:
    """Return (whitened values, mean, scale); the whitened values are 0 outside the mask."""
    if not enabled:
        return values_M, 0.0, 1.0
    mean, scale = whitening(values_M, mask_M)
    return (values_M - mean) / scale * mask_M, mean, scale


def on_last_action(rewards_B: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Return token rewards, f64 [M]: the reward of each sample on its last action token, and 0 elsewhere."""
    *begins, end = itertools.accumulate(map(len, masks), initial=0)
    placed_M = np.zeros(end)
    for reward, begin, mask in zip(rewards_B.tolist(), begins, masks, strict=True):
        place = last_action(mask.numpy())
        if place is not None:
            placed_M[begin + place] = reward
    return torch.from_numpy(placed_M)


def last_action(mask: np.ndarray) -> int | None:
    """Return the index of the last True in a mask; None if the mask has no True."""
    if not mask.any():
        return None
    return len(mask) - 1 - int(mask[::-1].argmax())


def whitening(values_M: Tensor, mask_M: Tensor) -> tuple[float, float]:
    """Return (mean, standard deviation) over the mask; (0, 1) for fewer than two tokens.

    The standard deviation is the root of the unbiased variance plus 1e-8. Non-finite values are ignored, so that such a
    value affects only the advantages of its own sample.
    """
    kept = values_M[mask_M & values_M.isfinite()].double()
    if len(kept) < 2:
        return 0.0, 1.0
    return float(kept.mean()), float((kept.var() + VARIANCE_FLOOR).sqrt())


def clipped(values: Tensor, limit: float | None) -> Tensor:
    """Clip values to ±`limit`; None: no limit.

    Non-finite values are kept, because the update must then be skipped.
    """
    return values if limit is None else values.clamp(-limit, limit).where(values.isfinite(), values)
