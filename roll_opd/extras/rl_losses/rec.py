"""REC loss: off-policy group-relative REINFORCE with clipping ranges and weights. arXiv 2509.24203.

Legend: see `LossBatch`.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from roll_opd.objective.losses.batch import LossBatch, outside
from roll_opd.objective.losses.policy_losses import vanilla
from roll_opd.objective.registry import register_policy_loss


@register_policy_loss("rec")
def rec(
    batch: LossBatch,
    *,
    clip_mode: Literal["none", "two-side", "one-side", "gspo-one-side", "ring"] = "none",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    epsilon_low_prime: float = 0.6,
    epsilon_high_prime: float = 2.0,
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = "none",
    temp: float = 1.0,
    regularizer: Literal["none", "forward-kl", "k2"] = "none",
    regularizer_coef: float = 0.0,
) -> Tensor:
    """Return -A · w · logprobs where the ratio is in range, plus a regulariser on every token.

    r is the ratio of a token, and s is the geometric mean of the ratios of its sequence. low and high are `epsilon_low`
    and `epsilon_high`; low' and high' are `epsilon_low_prime` and `epsilon_high_prime`.

    Args:
        clip_mode: range of the ratio:
            "none": all tokens are in range.
            "two-side": 1-low <= r <= 1+high.
            "one-side": r <= 1+high if A >= 0, and r >= 1-low if A <= 0. At A = 0, one of the two is sufficient.
            "gspo-one-side": like "one-side", with s instead of r.
            "ring": like "two-side", and also r <= 1-low' if A >= 0, and r >= 1+high' if A <= 0.
        weight: w, which has no gradient. "none" is 1, "importance_sampling" is r, "gspo_importance_sampling" is s, and
            "advantage" is exp(A/temp).
        regularizer: "forward-kl" adds -coef · logprobs, and "k2" adds coef · (logprobs - old_logprobs)².
    """
    ratio_M, sequence_ratio_M = batch.ratio_M.detach(), batch.sequence_ratio_M.detach()
    weights = {
        "none": torch.ones_like(ratio_M),
        "importance_sampling": ratio_M,
        "gspo_importance_sampling": sequence_ratio_M,
        "advantage": (batch.advantages_M / temp).exp(),
    }
    regularizers = {
        "none": torch.zeros_like(ratio_M),
        "forward-kl": -batch.action_logprobs_M,
        "k2": batch.log_ratio_M.square(),
    }
    kept_M = _in_range(
        batch,
        clip_mode=clip_mode,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        epsilon_low_prime=epsilon_low_prime,
        epsilon_high_prime=epsilon_high_prime,
    )
    loss_M = vanilla(batch) * _chosen("weight", weight, weights) * kept_M
    return loss_M + regularizer_coef * _chosen("regularizer", regularizer, regularizers)


def _in_range(
    batch: LossBatch,
    *,
    clip_mode: str,
    epsilon_low: float,
    epsilon_high: float,
    epsilon_low_prime: float,
    epsilon_high_prime: float,
    **_: object,
) -> Tensor:
    """Return a mask of the tokens in range, bool [M]; see `rec` for the arguments.

    All other arguments of `rec` are ignored.
    """
    ratio_M, sequence_ratio_M = batch.ratio_M.detach(), batch.sequence_ratio_M.detach()
    good_M, bad_M = batch.advantages_M >= 0, batch.advantages_M <= 0
    low, high = 1 - epsilon_low, 1 + epsilon_high
    inside_M = (ratio_M >= low) & (ratio_M <= high)
    ranges = {
        "none": torch.ones_like(batch.mask_M),
        "two-side": inside_M,
        "one-side": (good_M & (ratio_M <= high)) | (bad_M & (ratio_M >= low)),
        "gspo-one-side": (good_M & (sequence_ratio_M <= high)) | (bad_M & (sequence_ratio_M >= low)),
        "ring": inside_M
        | (good_M & (ratio_M <= 1 - epsilon_low_prime))
        | (bad_M & (ratio_M >= 1 + epsilon_high_prime)),
    }
    return _chosen("clip_mode", clip_mode, ranges)


@outside(rec)
def _outside(batch: LossBatch, arguments: Mapping[str, Any]) -> Tensor:
    return ~_in_range(batch, **arguments)


def _chosen(argument: str, name: str, among: dict[str, Tensor]) -> Tensor:
    if name not in among:
        raise ValueError(f"{argument} {name!r} of policy loss rec is unknown; use one of {', '.join(among)}")
    return among[name]
