"""Masks of the tokens that a policy loss clips. They are used for metrics. Legend: see `batch`."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.losses.likelihood import is_negative
from roll_opd.objective.losses.rec import in_range


def beyond_bounds(loss: str, batch: LossBatch, arguments: Mapping[str, Any]) -> Tensor:
    """Return a mask, bool [M], of the tokens whose ratio is outside the bounds of a policy loss.

    Tokens outside the batch's mask are False. `_OUTSIDE` lists losses with their own bounds. All other losses have the
    bounds 1 - `clip_low` and 1 + `clip_high`. A loss without these arguments has no bounds: for example, sapo, which
    has a smooth gate.

    Args:
        loss: name of the policy loss.
        arguments: all arguments of the loss, including defaults.
    """
    if loss in _OUTSIDE:
        return _OUTSIDE[loss](batch, arguments) & batch.mask_M
    if {"clip_low", "clip_high"} <= arguments.keys():
        ratio_M = batch.sequence_ratio_M if arguments.get("ratio_type") == "sequence" else batch.ratio_M
        return _beyond_clips(ratio_M, arguments) & batch.mask_M
    return batch.mask_M & False


def _beyond_clips(ratio_M: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    return _beyond(ratio_M, 1 - arguments["clip_low"], 1 + arguments["clip_high"])


def _beyond(ratio_M: Tensor, low: float, high: float) -> Tensor:
    return (ratio_M < low) | (ratio_M > high)


def _topr(batch: LossBatch, arguments: Mapping[str, Any]) -> Tensor:
    return is_negative(batch, arguments["advantage_threshold"], arguments["sign_of"]) & (batch.ratio_M > 1)


_OUTSIDE: dict[str, Callable[[LossBatch, Mapping[str, Any]], Tensor]] = {
    "gspo": lambda batch, arguments: _beyond_clips(batch.sequence_ratio_M, arguments),
    "tis": lambda batch, arguments: _beyond(batch.ratio_M, arguments["lower_bound"], arguments["upper_bound"]),
    "topr": _topr,
    "sppo": lambda batch, arguments: _beyond(batch.ratio_M, 1 / (1 + arguments["epsilon"]), 1 + arguments["epsilon"]),
    "rec": lambda batch, arguments: ~in_range(batch, **arguments),
}
