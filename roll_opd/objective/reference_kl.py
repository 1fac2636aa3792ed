"""The token-level KL to the reference policy: estimates, and the coefficient, which is fixed or adaptive."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.kl import KL_ESTIMATORS, adaptive_kl_coefficient
from roll_opd.samples.sample import Sample


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
