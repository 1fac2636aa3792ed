"""Estimators of KL(student || other) from log-probs of sampled tokens. John Schulman, "Approximating KL Divergence".

All take log-probs under the student (`logprobs`) and under the other model, f32 of one shape, and return that shape.
"""

from collections.abc import Callable

from torch import Tensor

from roll_opd.algorithms.losses import MAX_LOG_RATIO

MAX_LOW_VARIANCE = 10.0


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


# by the names of ROLL's kl_penalty
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": k1,
    "abs": absolute,
    "mse": k2,
    "low_var_kl": low_var_kl,
}
