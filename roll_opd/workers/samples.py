"""From experiences to what a train step reads."""

from collections.abc import Sequence

import numpy as np

from roll_opd.config.plan import ObjectivePlan, TeacherPlan
from roll_opd.data.experience import Experience
from roll_opd.data.training import TeacherView, TrainSample, ValueSample


def train_samples(
    experiences: Sequence[Experience], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> list[TrainSample]:
    """Return one `TrainSample` an experience.

    Where the teachers' part is an advantage, they are merged into two numbers a token (see algorithms.opd); where it is
    a part of the loss, each comes along with what it says, and the numbers are 0.
    """
    coefficients = {teacher.name: teacher.opd_kl_coef for teacher in teachers}
    sampled = objective.opd_objective == "sampled"
    samples = []
    for experience in experiences:
        mask = experience.action_mask
        scored = experience.teacher_logprobs if sampled else {}
        views = {} if sampled else experience.teacher_views
        total = np.float32(sum(coefficients[name] for name in scored))
        weighted = sum(
            (np.float32(coefficients[name]) * logprobs for name, logprobs in scored.items()),
            np.zeros(len(mask), np.float32),
        )
        samples.append(
            TrainSample(
                tokens=experience.tokens,
                prompt_length=experience.prompt_length,
                action_mask=mask,
                advantages=_advantages(experience),
                opd_coefficients=total * mask.astype(np.float32),
                # where, not a product: what lies under the mask may be infinite
                opd_teacher=np.where(mask, weighted, np.float32(0)).astype(np.float32),
                old_logprobs=experience.old_logprobs,
                ref_logprobs=experience.ref_logprobs,
                reward=experience.reward,
                teachers={name: TeacherView(coefficients[name], arrays) for name, arrays in views.items()},
                expert=experience.expert,
            )
        )
    return samples


def value_samples(experiences: Sequence[Experience]) -> list[ValueSample]:
    """Return one `ValueSample` an experience; each has its values and returns."""
    return [
        ValueSample(e.tokens, e.prompt_length, e.action_mask, e.values, e.returns.astype(np.float32))
        for e in experiences
    ]


def _advantages(experience: Experience) -> np.ndarray:
    if experience.advantages is None:  # nothing but the teacher, or an expert, speaks
        return np.zeros(experience.response_length, np.float32)
    return experience.advantages.astype(np.float32)
