"""`LossBatch`: input of policy losses.

A policy loss is a function `loss(batch, *, arguments) -> [M]`, one number per token: 0 off the mask, finite if the
log-probs on the mask are. It is independent of weights, ranks and packs: the sum over tokens, weighted by
`aggregation.token_weights`, is minimised.

Legend: M scored tokens of a pack, B sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from roll_opd.algorithms.sequences import on_tokens, sequence_means

MAX_LOG_RATIO = 20.0  # without the clamp one outlier token overflows


@dataclass(frozen=True)
class LossBatch:
    """Pack of whole sequences. Arrays are [M] and floating unless stated otherwise; only `logprobs_M` has a gradient.

    Log-probs off the mask are arbitrary, possibly infinite; advantages and rewards are finite.
    """

    logprobs_M: Tensor  # under the weights being trained
    old_logprobs_M: Tensor  # under the weights that the update starts from
    advantages_M: Tensor
    mask_M: Tensor  # bool, sampled tokens
    lengths: tuple[int, ...]  # scored tokens of each sequence, B of them, Σ = M
    rewards_M: Tensor | None = None  # reward of each token's sequence
    ref_logprobs_M: Tensor | None = None  # under the frozen reference policy
    demonstration_M: Tensor | None = None  # bool, tokens of demonstrations
    step: int = 1  # of the run, from 1

    @property
    def action_logprobs_M(self) -> Tensor:
        """`logprobs_M`, 0 off the mask."""
        return torch.where(self.mask_M, self.logprobs_M, 0)

    @property
    def log_ratio_M(self) -> Tensor:
        """logprobs - old_logprobs, 0 off the mask."""
        return torch.where(self.mask_M, self.logprobs_M - self.old_logprobs_M, 0)

    @property
    def ratio_M(self) -> Tensor:
        """exp(log_ratio), with the log-ratio clamped to ±20; 1 off the mask."""
        return _ratio(self.log_ratio_M)

    @property
    def sequence_ratio_M(self) -> Tensor:
        """Geometric mean of the sequence's ratios (logarithm clamped to ±20) at each token."""
        return on_tokens(_ratio(sequence_means(self.log_ratio_M, self.mask_M, self.lengths)), self.lengths)

    def needs(self, name: str, loss: str) -> Tensor:
        """Return the optional array `name`; raises ValueError if the batch lacks it."""
        found = getattr(self, name)
        if found is None:
            raise ValueError(f"policy loss {loss} needs {name} in its batch, but there is none")
        return found


def probability_ratio(logprobs_M: Tensor, old_logprobs_M: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs), with the log-ratio clamped to ±20."""
    return _ratio(logprobs_M - old_logprobs_M)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
