"""Likelihood losses: the log-likelihood times a weight without a gradient (OPMD, TIS, TOPR, Kimi k1.5).

Legend: see `LossBatch`.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from roll_opd.objective.losses.batch import LossBatch, beyond, outside
from roll_opd.objective.losses.policy_losses import vanilla
from roll_opd.objective.registry import register_policy_loss


@register_policy_loss("opmd")
def opmd(batch: LossBatch, *, tau: float = 1.0) -> Tensor:
    """Return -A · logprobs / (1+τ). Trinity-RFT, arXiv 2505.17826."""
    return vanilla(batch) / (1 + tau)


@register_policy_loss("tis")
def tis(batch: LossBatch, *, lower_bound: float = 0.0, upper_bound: float = 1.0) -> Tensor:
    """Return -A · sg(clip(r, lower, upper)) · logprobs, the loss of truncated importance sampling.

    This is ROLL's pg_variant `tis`.
    """
    return vanilla(batch) * batch.ratio_M.detach().clamp(lower_bound, upper_bound)


@outside(tis)
def _tis_outside(batch: LossBatch, arguments: Mapping[str, Any]) -> Tensor:
    return beyond(batch.ratio_M, arguments["lower_bound"], arguments["upper_bound"])


@register_policy_loss("topr")
def topr(
    batch: LossBatch,
    *,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
    advantage_threshold: float = 0.0,
    sign_of: Literal["advantage", "reward"] = "advantage",
) -> Tensor:
    """Return -sg(α) · A · logprobs. arXiv 2503.14286, Trinity-RFT.

    α is `positive_weight` if A > `advantage_threshold`, and `negative_weight` · clip(r, 0, 1) otherwise.

    Args:
        sign_of: "advantage", or "reward" to compare the reward with the threshold instead of A. ROLL compares the
            reward, because a baseline may change the sign of advantages. If the batch has no rewards, A is compared.
    """
    if sign_of not in ("advantage", "reward"):
        raise ValueError(f"sign_of {sign_of!r} of policy loss topr is unknown; use advantage or reward")
    negative_M = _is_negative(batch, advantage_threshold, sign_of)
    tapered_M = negative_weight * batch.ratio_M.detach().clamp(0, 1)
    return vanilla(batch) * torch.where(negative_M, tapered_M, positive_weight)


def _is_negative(batch: LossBatch, threshold: float, sign_of: str) -> Tensor:
    """Return a mask of the tokens to which `topr` applies the clipped ratio, bool [M]."""
    sign_M = batch.advantages_M if sign_of == "advantage" or batch.rewards_M is None else batch.rewards_M
    return sign_M <= threshold


@outside(topr)
def _topr_outside(batch: LossBatch, arguments: Mapping[str, Any]) -> Tensor:
    return _is_negative(batch, arguments["advantage_threshold"], arguments["sign_of"]) & (batch.ratio_M > 1)


@register_policy_loss("kimi15")
def kimi15(batch: LossBatch, *, tau: float = 0.1) -> Tensor:
    """Return -A · logprobs + τ/2 · (logprobs - old_logprobs)². Kimi k1.5, arXiv 2501.12599."""
    return vanilla(batch) + tau / 2 * batch.log_ratio_M.square()
