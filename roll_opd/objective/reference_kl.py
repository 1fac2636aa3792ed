"""The token-level KL to the reference policy: its estimates, and its coefficient, which may adapt to them."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roll_opd.algorithms.kl import KL_ESTIMATORS, adaptive_kl_coefficient
from roll_opd.config.plan import ObjectivePlan
from roll_opd.samples.experience import Experience


def first_kl_coef(objective: ObjectivePlan, saved: float | None) -> float:
    """Return the token-level KL's coefficient in the first step of a run; `saved` is the one of its checkpoint."""
    return saved if saved and objective.target_kl else objective.init_kl_coef


def kl_coefs(experiences: Sequence[Experience], objective: ObjectivePlan, kl_coef: float | None = None) -> list[float]:
    """Return the token-level KL's coefficient for each reward domain's samples in turn, and last the next step's.

    Where there is a `target_kl`, the coefficient moves after each domain by the KL of its samples, as in ROLL.
    """
    found = [objective.init_kl_coef if kl_coef is None else kl_coef]
    for members in by_domain(experiences):
        of_domain = [experiences[number] for number in members]
        if objective.target_kl is None:
            found.append(found[-1])
            continue
        kl = reference_kl_mean([e for e in of_domain if not e.excluded], objective)
        found.append(
            adaptive_kl_coefficient(
                found[-1], kl, target=objective.target_kl, horizon=objective.kl_horizon, samples=len(of_domain)
            )
        )
    return found


def by_domain(experiences: Sequence[Experience]) -> list[list[int]]:
    """Return the numbers of each reward domain's samples, in the order in which the domains first appear."""
    members: dict[str, list[int]] = {}
    for number, experience in enumerate(experiences):
        members.setdefault(experience.domain, []).append(number)
    return list(members.values())


def reference_kl_mean(experiences: Sequence[Experience], objective: ObjectivePlan) -> float:
    """Return the mean over samples of token means; NaN where no sample has an action token."""
    acted = [e for e in experiences if e.action_mask.any()]
    means = [reference_kl(e, objective.kl_penalty).sum() / e.action_mask.sum() for e in acted]
    return float(np.mean(means)) if means else math.nan


def reference_kl(experience: Experience, kl_penalty: str) -> Tensor:
    """Return estimates of KL(student || reference), f64 [T-P], 0 off the action mask."""
    student, reference = (
        torch.tensor(x, dtype=torch.float64) for x in (experience.old_logprobs, experience.ref_logprobs)
    )
    return torch.where(torch.tensor(experience.action_mask), KL_ESTIMATORS[kl_penalty](student, reference), 0.0)
