"""`LossBatch`, the input of policy losses, and the masks of the tokens that a loss clips.

A policy loss is a function `loss(batch, *, arguments) -> [M]`. It returns one value per token, and 0 for tokens outside
the mask. If the log-probs in the mask are finite, the values are finite. The value of a token does not depend on token
weights, ranks or packs.

Training minimises the sum of these values, weighted by `aggregation.token_weights`.

Legend: a pack has B sequences with M scored tokens in total.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from roll_opd.objective.registry import POLICY_LOSSES, PolicyLoss

MAX_LOG_RATIO = 20.0  # without a clamp, a single outlier token could overflow


@dataclass(frozen=True)
class LossBatch:
    """A pack of whole sequences.

    Arrays have the shape [M] and a floating-point dtype unless stated otherwise. Only `logprobs_M` has a gradient.
    Log-probs outside the mask are arbitrary and may be infinite. Advantages and rewards are finite everywhere.
    """

    logprobs_M: Tensor  # under the weights that are being trained
    old_logprobs_M: Tensor  # under the weights at the start of the update
    advantages_M: Tensor
    mask_M: Tensor  # bool, sampled tokens
    lengths: tuple[int, ...]  # number of scored tokens of each of the B sequences, Σ = M
    rewards_M: Tensor | None = None  # reward of each token's sequence
    ref_logprobs_M: Tensor | None = None  # under the frozen reference policy
    demonstration_M: Tensor | None = None  # bool, true for tokens of demonstrations
    step: int = 1  # step of the run, from 1

    @property
    def action_logprobs_M(self) -> Tensor:
        """`logprobs_M`, 0 outside the mask."""
        return torch.where(self.mask_M, self.logprobs_M, 0)

    @property
    def log_ratio_M(self) -> Tensor:
        """logprobs - old_logprobs, 0 outside the mask."""
        return torch.where(self.mask_M, self.logprobs_M - self.old_logprobs_M, 0)

    @property
    def ratio_M(self) -> Tensor:
        """exp(log_ratio), with the log-ratio clamped to ±20; 1 outside the mask."""
        return _ratio(self.log_ratio_M)

    @property
    def sequence_ratio_M(self) -> Tensor:
        """Geometric mean of the ratios of each token's sequence. Its logarithm is clamped to ±20."""
        return on_tokens(_ratio(sequence_means(self.log_ratio_M, self.mask_M, self.lengths)), self.lengths)

    def needs(self, name: str, loss: str) -> Tensor:
        """Return the optional array `name`; raise ValueError if the batch does not have it."""
        found = getattr(self, name)
        if found is None:
            raise ValueError(f"policy loss {loss} needs {name} in its batch, but there is none")
        return found


def probability_ratio(logprobs_M: Tensor, old_logprobs_M: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs), with the log-ratio clamped to ±20."""
    return _ratio(logprobs_M - old_logprobs_M)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sums(values_M: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sum over each sequence, [B]; 0 for an empty sequence."""
    return values_M.new_zeros(len(lengths)).index_add(0, sequence_numbers(lengths, values_M.device), values_M)


def sequence_means(values_M: Tensor, mask_M: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean over the masked tokens of each sequence, [B]. If a sequence has no such token, its mean is 0."""
    sums_B = sequence_sums(torch.where(mask_M, values_M, 0), lengths)
    return sums_B / sequence_sums(mask_M.to(values_M.dtype), lengths).clamp(min=1)


def on_tokens(values_B: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return, for each token, the value of the token's sequence, [M]."""
    return values_B[sequence_numbers(lengths, values_B.device)]


def sequence_numbers(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return, for each token, the index of the token's sequence, int64 [M]."""
    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(device)


Outside = TypeVar("Outside", bound=Callable[[LossBatch, Mapping[str, Any]], Tensor])

_OUTSIDE: dict[PolicyLoss, Callable[[LossBatch, Mapping[str, Any]], Tensor]] = {}


def outside(loss: PolicyLoss) -> Callable[[Outside], Outside]:
    """Register the decorated function for `beyond_bounds`, for a loss with bounds of its own form.

    The function gets the batch and all arguments of `loss`, and returns the mask of the tokens whose ratio is outside
    the bounds.
    """

    def decorate(mask: Outside) -> Outside:
        _OUTSIDE[loss] = mask
        return mask

    return decorate


def beyond_bounds(loss: str, batch: LossBatch, arguments: Mapping[str, Any]) -> Tensor:
    """Return a mask, bool [M], of the tokens whose ratio is outside the bounds of a policy loss.

    Tokens outside the batch's mask are False. A function that `outside` has registered for the loss computes the mask.
    Otherwise the bounds are 1 - `clip_low` and 1 + `clip_high`. A loss without these arguments, such as sapo, has no
    bounds.

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
