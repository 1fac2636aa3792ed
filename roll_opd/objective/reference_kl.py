"""The KL to the reference policy: estimators of a token's KL, and the coefficient of the penalty, fixed or adaptive.

The estimators are those of John Schulman, "Approximating KL Divergence". Each takes two f32 arrays of the same shape,
and returns an array of this shape. `logprobs` are the log-probs under the student, and `other` are the log-probs under
the other model.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.losses.batch import MAX_LOG_RATIO, probability_ratio
from roll_opd.samples.sample import Sample

MAX_LOW_VARIANCE = 10.0
MAX_CORRECTION = 2.0  # upper bound on the ratio in corrected_k3
MAX_KL_ERROR = 0.2  # bound on the relative error in the adaptive coefficient's update


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return Δ = logprobs - other. The estimate is unbiased and may be negative.

    k1 cannot be a loss, because its gradient does not depend on `other`.
    """
    return logprobs - other


def absolute(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return |Δ|, where Δ = logprobs - other."""
    return (logprobs - other).abs()


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return Δ²/2, where Δ = logprobs - other.

    As a loss on the student's samples, k2 has the gradient of the reverse KL.
    """
    return (logprobs - other).square() / 2


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return e^-Δ - 1 + Δ, where Δ = logprobs - other. The estimate is unbiased and never negative.

    As a loss, k3 has the gradient of the forward KL. As in Trinity-RFT, the value has no upper bound. For example, if a
    token is e^20 times likelier under `other`, the value is about e^20.
    """
    log_ratio = other - logprobs
    return log_ratio.exp() - 1 - log_ratio


def low_var_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return `k3`, clipped at 10. Above 10, the gradient is 0.

    This is ROLL's k3 and Trinity-RFT's low_var_kl.
    """
    log_ratio = (other - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # beyond 20 the value is clipped at 10 anyway
    return (log_ratio.exp() - 1 - log_ratio).clamp(-MAX_LOW_VARIANCE, MAX_LOW_VARIANCE)


def corrected_k3(logprobs: Tensor, other: Tensor, old: Tensor | None = None) -> Tensor:
    """Return clamp(r, 0, 2) · `k3`, where r = e^(logprobs - old).

    r has a gradient. As a loss, corrected_k3 therefore has the gradient of the reverse KL.

    Args:
        old: log-probs under the rollout weights. None: the samples are on-policy, so the value of r is 1.
    """
    old = logprobs.detach() if old is None else old
    return probability_ratio(logprobs, old).clamp(0, MAX_CORRECTION) * k3(logprobs, other)


def adaptive_kl_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, samples: int) -> float:
    """Return the KL coefficient of the next step. arXiv 1909.08593.

    The result is coefficient · (1 + clip(kl/target - 1, ±0.2) · samples/horizon). The coefficient grows if `kl` is
    above `target`, and falls if `kl` is below it. If `kl` is not finite, the coefficient is not changed.

    Args:
        horizon: number of samples in which the coefficient changes by at most a fifth.
        samples: number of samples in this step.
    """
    if not math.isfinite(kl):
        return coefficient
    error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coefficient * (1 + error * samples / horizon)


READS_OLD = ("corrected_k3",)  # estimators that also need the log-probs of the rollout
# names from ROLL's kl_penalty and from the literature; `table` lists where each may be used
KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {"kl": k1, "k1": k1, "abs": absolute, "mse": k2, "k2": k2, "k3": k3}
KL_ESTIMATORS |= {"low_var_kl": low_var_kl, "corrected_k3": corrected_k3}


def first_kl_coef(objective: ObjectivePlan, saved: float | None) -> float:
    """Return the KL coefficient of a run's first step.

    `saved` is the coefficient in the checkpoint from which the run resumes.
    """
    return saved if saved and objective.target_kl else objective.init_kl_coef


def kl_coefs(samples: Sequence[Sample], objective: ObjectivePlan, kl_coef: float | None = None) -> list[float]:
    """Return the KL coefficients of all reward domains, in the order of `by_domain`, and last of the next step.

    With a `target_kl`, the coefficient is adapted after each domain, from the mean KL of the domain's samples. The
    result is used for the next domain; after the last domain, it is used for the next step. ROLL does the same.
    """
    found = [objective.init_kl_coef if kl_coef is None else kl_coef]
    for members in by_domain(samples):
        of_domain = [samples[number] for number in members]
        if objective.target_kl is None:
            found.append(found[-1])
            continue
        kl = reference_kl_mean([s for s in of_domain if not s.excluded], objective)
        found.append(
            adaptive_kl_coefficient(
                found[-1], kl, target=objective.target_kl, horizon=objective.kl_horizon, samples=len(of_domain)
            )
        )
    return found


def by_domain(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of the samples of each reward domain. Domains are in the order in which they first appear."""
    members: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        members.setdefault(sample.domain, []).append(number)
    return list(members.values())


def reference_kl_mean(samples: Sequence[Sample], objective: ObjectivePlan) -> float:
    """Return the mean over samples of each sample's mean KL over tokens, or NaN if no sample has an action token."""
    acted = [s for s in samples if s.action_mask.any()]
    means = [reference_kl(s, objective.kl_penalty).sum() / s.action_mask.sum() for s in acted]
    return float(np.mean(means)) if means else math.nan


def reference_kl(sample: Sample, kl_penalty: str) -> Tensor:
    """Return estimates of KL(student || reference), f64 [T-P], 0 outside the action mask."""
    student, reference = (torch.tensor(x, dtype=torch.float64) for x in (sample.old_logprobs, sample.ref_logprobs))
    return torch.where(torch.tensor(sample.action_mask), KL_ESTIMATORS[kl_penalty](student, reference), 0.0)
