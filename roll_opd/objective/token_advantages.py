"""Compute token advantages from normalised rewards: returns-to-go or GAE, optionally whitened.

    A = whiten(Σ_k γ^k r_{t+k}); with a critic: A = whiten(GAE of r)
    r = whiten(R' on the last action token, 0 elsewhere, minus a penalty per token)

k counts action tokens, or turns if gamma is applied per turn. R' is the normalised reward of an advantage function (see
`advantages`). Whitening, discount and penalty are optional.

The teachers' term is added later, in `objective.loss`, because whitening the sum would remove the signal of this term.
The sum is then clipped.

Legend: B samples with M scored tokens in total, concatenated. All arrays are float64, because they are small and tests
compare six digits of long sums.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roll_opd.objective.returns import discounted_to_go, gae, turns_to_go

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
