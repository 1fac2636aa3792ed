"""Masks of the tokens that a policy loss clips. They are used for metrics. Legend: see `batch`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.registry import POLICY_LOSSES, PolicyLoss

Outside = TypeVar("Outside", bound=Callable[[LossBatch, Mapping[str, Any]], Tensor])

_OUTSIDE: dict[PolicyLoss, Callable[[LossBatch, Mapping[str, Any]], Tensor]] = {}


def outside(loss: PolicyLoss) -> Callable[[Outside], Outside]:
    """Make the decorated function the mask of the tokens whose ratio is outside the bounds of `loss`.

    The function is called with the batch and all arguments of the loss.
    """

    def decorate(mask: Outside) -> Outside:
        _OUTSIDE[loss] = mask
        return mask

    return decorate


def beyond_bounds(loss: str, batch: LossBatch, arguments: Mapping[str, Any]) -> Tensor:
    """Return a mask, bool [M], of the tokens whose ratio is outside the bounds of a policy loss.

    Tokens outside the batch's mask are False. A loss has the mask of its function `outside`, or the bounds 1 -
    `clip_low` and 1 + `clip_high`. A loss without these arguments has no bounds: for example, sapo, which has a smooth
    gate.

    Args:
        loss: name of the policy loss.
        arguments: all arguments of the loss, including defaults.
    """
    own = _OUTSIDE.get(POLICY_LOSSES.find(loss))
    if own:
        return own(batch, arguments) & batch.mask_M
    if {"clip_low", "clip_high"} <= arguments.keys():
        ratio_M = batch.sequence_ratio_M if arguments.get("ratio_type") == "sequence" else batch.ratio_M
        return beyond(ratio_M, 1 - arguments["clip_low"], 1 + arguments["clip_high"]) & batch.mask_M
    return batch.mask_M & False


def beyond(ratio_M: Tensor, low: float, high: float) -> Tensor:
    """Return a mask of the ratios below `low` or above `high`."""
    return (ratio_M < low) | (ratio_M > high)
