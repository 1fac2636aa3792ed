"""What a policy loss reads.

A policy loss is a function `loss(batch, *, its own arguments) -> [M]`, a number for each token: 0 off the mask, finite
wherever the log-probs on the mask are. It knows nothing of weights, ranks and packs: the sum over its tokens, weighted
by `aggregation.token_weights`, is minimised.

Legend: M scored tokens of a pack, B sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from roll_opd.algorithms.sequences import on_tokens, sequence_means

MAX_LOG_RATIO = 20.0  # e^20 is already absurd; without the clamp one wild token overflows


@dataclass(frozen=True)
class LossBatch:
    """A pack of whole sequences. Arrays are [M] and floating unless said otherwise; only `logprobs_M` has a gradient.

    Log-probs off the mask may be anything, infinities included; advantages and rewards are finite.
    """

    logprobs_M: Tensor  # under the weights being trained
    old_logprobs_M: Tensor  # under the weights that the update starts from
    advantages_M: Tensor
    mask_M: Tensor  # bool, the tokens that the student chose
    lengths: tuple[int, ...]  # scored tokens of each sequence, B of them, Σ = M
    rewards_M: Tensor | None = None  # the external reward of each token's sequence
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
        """exp(log_ratio), the log-ratio clamped to ±20; 1 off the mask."""
        return _ratio(self.log_ratio_M)

    @property
    def sequence_ratio_M(self) -> Tensor:
        """The geometric mean of a sequence's ratios (its logarithm clamped to ±20), for each of its tokens."""
        return on_tokens(_ratio(sequence_means(self.log_ratio_M, self.mask_M, self.lengths)), self.lengths)

    def needs(self, name: str, loss: str) -> Tensor:
        """Return the optional array `name`; ValueError where the batch lacks it."""
        found = getattr(self, name)
        if found is None:
            raise ValueError(f"policy loss {loss} reads {name} of its batch, and there is none")
        return found


def probability_ratio(logprobs_M: Tensor, old_logprobs_M: Tensor) -> Tensor:
    """exp(logprobs - old_logprobs), the log-ratio clamped to ±20."""
    return _ratio(logprobs_M - old_logprobs_M)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
