"""The audit of an update, in f64, for metrics and records: token rewards, and what tokens were weighted with.

The update itself computes its weights in f32, in `megatron.trainer`; the formulas are those of `objective.advantages`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from roll_opd.algorithms.returns import discounted_to_go
from roll_opd.algorithms.token_advantages import clipped, last_action
from roll_opd.config.plan import ObjectivePlan, TeacherPlan
from roll_opd.objective.advantages import reward_of
from roll_opd.objective.reference_kl import reference_kl, reference_kl_mean
from roll_opd.samples.experience import Experience
from roll_opd.samples.flatten import joined_masks, picked, split_by_sample
from roll_opd.tracking.metrics import statistics


def token_level_rewards(
    experiences: Sequence[Experience], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> list[np.ndarray]:
    """Return token rewards, f64 [T-P] a sample, 0 off the action mask."""
    return _token_level_rewards(experiences, _penalties(experiences, teachers), objective)


def _token_level_rewards(
    experiences: Sequence[Experience], penalty_M: np.ndarray, objective: ObjectivePlan
) -> list[np.ndarray]:
    rewards = split_by_sample(-penalty_M, experiences)
    for experience, reward in zip(experiences, rewards, strict=True):
        if objective.init_kl_coef and not experience.demonstration:
            reward -= experience.metrics["kl_coef"] * reference_kl(experience, objective.kl_penalty).numpy()
        if experience.advantages is not None and not experience.excluded:
            place = last_action(experience.action_mask)
            if place is not None:
                reward[place] += reward_of(experience)
    return rewards


def advantages(
    experiences: Sequence[Experience],
    teachers: Sequence[TeacherPlan],
    opd_kl_discount: float,
    advantage_clip: float | None = None,
) -> list[np.ndarray]:
    """Return what a sample's update was weighted with, f64 [T-P], 0 off the action mask and of demonstrations.

    The audit of an update, in f64 and for metrics and records; the update itself computes it in f32, in
    `megatron.trainer`.
    """
    weights_M = _weights(experiences, _penalties(experiences, teachers), opd_kl_discount, advantage_clip)
    return split_by_sample(weights_M, experiences)


def _weights(
    experiences: Sequence[Experience], penalty_M: np.ndarray, opd_kl_discount: float, advantage_clip: float | None
) -> np.ndarray:
    lengths = [e.response_length for e in experiences]
    mask_M = torch.from_numpy(joined_masks(experiences))
    weights_M = discounted_to_go(torch.from_numpy(penalty_M), mask_M, lengths, opd_kl_discount)
    for own, part in zip([e.advantages for e in experiences], weights_M.split(lengths), strict=True):
        torch.sub(torch.zeros(()) if own is None else torch.from_numpy(own), part, out=part)
    return torch.where(mask_M, clipped(weights_M, advantage_clip), 0.0).numpy()


def advantage_metrics(
    experiences: Sequence[Experience], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> dict[str, float]:
    """Return `critic/rewards` (Σ of a sample's token rewards), `critic/advantages` (of action tokens): mean, max, min.

    Of samples that are learned from. With a token-level KL also `critic/kl_coef` and `critic/reference_kl`, its mean
    over samples of token means.
    """
    experiences = [experience for experience in experiences if not experience.excluded]
    penalty_M = _penalties(experiences, teachers)
    rewards = [tokens.sum() for tokens in _token_level_rewards(experiences, penalty_M, objective)]
    weights_M = _weights(experiences, penalty_M, objective.opd_kl_discount, objective.advantage_clip)
    kinds = ("mean", "max", "min")
    return {
        **statistics("critic/rewards", rewards, kinds),
        **statistics("critic/advantages", picked(weights_M, joined_masks(experiences)), kinds),
        **(_reference_metrics(experiences, objective) if objective.init_kl_coef else {}),
    }


def _reference_metrics(experiences: Sequence[Experience], objective: ObjectivePlan) -> dict[str, float]:
    acted = [e for e in experiences if e.action_mask.any()]
    if not acted:
        return {}
    return {
        "critic/kl_coef": acted[0].metrics["kl_coef"],
        "critic/reference_kl": reference_kl_mean(experiences, objective),
    }


def _penalties(experiences: Sequence[Experience], teachers: Sequence[TeacherPlan]) -> np.ndarray:
    """Return Σ opd_kl_coef · reverse_kl, f64 [M], the samples' tokens end to end, 0 off the action mask."""
    mask_M = joined_masks(experiences)
    penalty_M = np.zeros(len(mask_M))
    if not experiences:
        return penalty_M
    student = [e.student_logprobs for e in experiences]
    student_M = np.concatenate(student).astype(np.float64)
    for teacher in teachers:
        # a sample that the teacher has not read contributes no penalty
        read = [e.teacher_logprobs.get(teacher.name, own) for e, own in zip(experiences, student, strict=True)]
        gap_M = np.subtract(student_M, np.concatenate(read))
        penalty_M += np.multiply(gap_M, teacher.opd_kl_coef, out=gap_M)
    penalty_M[~mask_M] = 0.0
    return penalty_M
