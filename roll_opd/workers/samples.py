"""From experiences to what a train step reads."""

from collections.abc import Sequence

import numpy as np

from roll_opd.config.plan import ObjectivePlan, TeacherPlan
from roll_opd.data.experience import Experience
from roll_opd.data.training import TeacherTargets, TrainSample, ValueSample


def train_samples(
    experiences: Sequence[Experience], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> list[TrainSample]:
    """Return one `TrainSample` an experience.

    Where the teachers' part is an advantage, they are merged into two numbers a token (see algorithms.opd); where it is
    a part of the loss, each comes along with what it says, and the numbers are 0.
    """
    sampled = objective.opd_objective == "sampled"
    coefficients = {teacher.name: teacher.opd_kl_coef for teacher in teachers}
    # not left out where they are 0: what is not finite then still shows, as 0 times it is NaN
    of_advantages = {name: np.float32(value if sampled else 0) for name, value in coefficients.items()}
    samples = []
    for experience in experiences:
        mask, scored = experience.action_mask, experience.teacher_logprobs
        views = {} if sampled else experience.teacher_targets
        total = np.float32(sum(of_advantages[name] for name in scored))
        with np.errstate(invalid="ignore"):
            weighted = sum(
                (of_advantages[name] * logprobs for name, logprobs in scored.items()), np.zeros(len(mask), np.float32)
            )
        samples.append(
            TrainSample(
                tokens=experience.tokens,
                prompt_length=experience.prompt_length,
                action_mask=mask if experience.loss_mask is None else experience.loss_mask,
                advantages=_advantages(experience),
                opd_coefficients=total * mask.astype(np.float32),
                # where, not a product: what lies under the mask may be infinite
                opd_teacher=np.where(mask, weighted, np.float32(0)).astype(np.float32),
                old_logprobs=experience.old_logprobs,
                ref_logprobs=experience.ref_logprobs,
                importance_weights=experience.importance_weights,
                reward=0.0 if experience.excluded else experience.reward,
                teachers={name: TeacherTargets(coefficients[name], arrays) for name, arrays in views.items()},
                demonstration=experience.demonstration,
            )
        )
    return samples


def value_samples(experiences: Sequence[Experience]) -> list[ValueSample]:
    """Return one `ValueSample` an experience; each has its values and returns."""
    return [
        ValueSample(e.tokens, e.prompt_length, e.action_mask & (not e.excluded), e.values, e.returns.astype(np.float32))
        for e in experiences
    ]


def _advantages(experience: Experience) -> np.ndarray:
    if experience.advantages is None:  # nothing but the teacher, or a demonstration, speaks
        return np.zeros(experience.response_length, np.float32)
    return experience.advantages.astype(np.float32)
