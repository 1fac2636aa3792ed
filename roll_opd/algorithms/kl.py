"""Estimators of KL(student || other) from log-probs of sampled tokens. John Schulman, "Approximating KL Divergence".

All take log-probs under the student (`logprobs`) and under the other model, f32 of one shape, and return that shape.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from roll_opd.algorithms.losses.batch import MAX_LOG_RATIO, probability_ratio

MAX_LOW_VARIANCE = 10.0
MAX_CORRECTION = 2.0  # of the ratio in corrected_k3
MAX_KL_ERROR = 0.2  # relative, of one step of the adaptive coefficient


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """Δ = logprobs - other: unbiased; may be negative. No loss by itself: its gradient does not know `other`."""
    return logprobs - other


def absolute(logprobs: Tensor, other: Tensor) -> Tensor:
    """|Δ|."""
    return (logprobs - other).abs()


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """Δ²/2: as a loss on the student's own samples, its gradient is that of the reverse KL."""
    return (logprobs - other).square() / 2


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """e^-Δ - 1 + Δ: unbiased, never negative. As a loss, its gradient is that of the forward KL."""
    log_ratio = (other - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio


def low_var_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """`k3`, at most 10."""
    return k3(logprobs, other).clamp(-MAX_LOW_VARIANCE, MAX_LOW_VARIANCE)


def corrected_k3(logprobs: Tensor, other: Tensor, old: Tensor | None = None) -> Tensor:
    """clamp(r, 0, 2) · `k3`, r = e^(logprobs - old) with its gradient: as a loss, that of the reverse KL.

    `old` are the log-probs of the weights that sampled; without them the student is still on policy, and r is 1.
    """
    old = logprobs.detach() if old is None else old
    return probability_ratio(logprobs, old).clamp(0, MAX_CORRECTION) * k3(logprobs, other)


def adaptive_kl_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, samples: int) -> float:
    """Return the KL coefficient of the next step: more where `kl` is above `target`, less below. arXiv 1909.08593.

    coefficient · (1 + clip(kl/target - 1, ±0.2) · samples/horizon); `samples` are those of the step, and the
    coefficient moves by at most a fifth in `horizon` of them. A `kl` that is not finite leaves it as it is.
    """
    if not math.isfinite(kl):
        return coefficient
    error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coefficient * (1 + error * samples / horizon)


@dataclass(frozen=True)
class KLEstimator:
    """An estimator under one of its names, and what the name may be used for."""

    estimate: Callable[..., Tensor]
    loss: bool = False  # as a KL loss; its gradient then knows the other model
    penalty: str | None = None  # as kl_penalty, of a token's reward: the name of the estimator that ROLL means by it
    reads_old: bool = False  # takes the log-probs under the weights that sampled, too

    def __call__(self, logprobs: Tensor, *others: Tensor) -> Tensor:
        return self.estimate(logprobs, *others)


# by the names of ROLL's kl_penalty and of the literature
KL_ESTIMATORS: dict[str, KLEstimator] = {
    "kl": KLEstimator(k1, penalty="kl"),
    "k1": KLEstimator(k1, penalty="kl"),
    "abs": KLEstimator(absolute, loss=True, penalty="abs"),
    "mse": KLEstimator(k2, penalty="mse"),
    "k2": KLEstimator(k2, loss=True, penalty="mse"),
    "k3": KLEstimator(k3, loss=True, penalty="low_var_kl"),
    "low_var_kl": KLEstimator(low_var_kl, loss=True, penalty="low_var_kl"),
    "corrected_k3": KLEstimator(corrected_k3, loss=True, reads_old=True),
}
KL_LOSSES = tuple(name for name, estimator in KL_ESTIMATORS.items() if estimator.loss)
KL_PENALTIES = {name: estimator.penalty for name, estimator in KL_ESTIMATORS.items() if estimator.penalty}
