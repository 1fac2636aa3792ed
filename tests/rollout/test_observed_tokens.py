"""What a run observed, the text of tools and of others, reaches no advantage, weight or mask, and no metric."""

from dataclasses import replace

import numpy as np
import pytest

from roll_opd.data.experience import Experience
from roll_opd.plan import (
    CorrectionPlan,
    Layout,
    MegatronPlan,
    MicroBatchLimits,
    ModelPlan,
    ObjectivePlan,
    SamplingPlan,
    TeacherPlan,
    TokenFilterPlan,
)
from roll_opd.rollout.advantages import external_advantages
from roll_opd.rollout.audit import advantage_metrics
from roll_opd.rollout.masks import mask_metrics, masked
from roll_opd.rollout.mismatch import corrected, train_infer_metrics
from roll_opd.rollout.reference_kl import kl_coefs
from roll_opd.tracking.metrics import opd_metrics
from roll_opd.tracking.rewards import reward_metrics

TEACHERS = [
    TeacherPlan(name, MegatronPlan(name, ModelPlan("m"), (0,), Layout(), MicroBatchLimits()), weight)
    for name, weight in (("one", 0.7), ("other", 0.3))
]
CORRECTION = CorrectionPlan(
    weight="tis", high=2.0, filters=(TokenFilterPlan("ratio", "token", 0.5, 2.0),), negatives_delta=0.1
)
OBJECTIVES = {
    "pure": (ObjectivePlan(), TEACHERS),
    "mixed": (ObjectivePlan(adv_estimator="grpo", opd_kl_discount=0.9, init_kl_coef=0.1), TEACHERS),
    "corrected": (ObjectivePlan(adv_estimator="grpo", correction=CORRECTION, max_len_mask=True), TEACHERS),
    "rl": (ObjectivePlan(adv_estimator="step_wise_grpo", init_kl_coef=0.2), []),
}


def conversations(seed: int) -> list[Experience]:
    """Two prompts, three runs each, of one or two conversations with something observed in the middle of each."""
    rng = np.random.default_rng(seed)
    found = []
    for group in "ab":
        for run in range(3):
            for step in range(int(rng.integers(1, 3))):
                written, seen, last = rng.integers(1, 5, 3)
                mask = np.repeat([True, False, True], [written, seen, last])
                length = len(mask)

                def draw(length: int = length) -> np.ndarray:
                    return -rng.random(length).astype(np.float32)

                found.append(
                    Experience(
                        id=f"{group}/{run}.{step}",
                        group_id=group,
                        run=run,
                        step=step,
                        tag="t",
                        domain="math",
                        tokens=np.arange(length + 2),
                        prompt_length=2,
                        action_mask=mask,
                        rollout_logprobs=draw(),
                        old_logprobs=draw(),
                        teacher_logprobs={"one": draw(), "other": draw()},
                        ref_logprobs=draw(),
                        finish_reason="stop",
                        weights_version=0,
                        reward=float(rng.random()),
                    )
                )
    return found


def disturbed(experience: Experience, rng: np.random.Generator) -> Experience:
    """Add 100 to the log-probs of every observed token, or take it away."""

    def other(logprobs: np.ndarray) -> np.ndarray:
        wild = logprobs + rng.choice([-100, 100], len(logprobs)).astype(np.float32)
        return np.where(experience.action_mask, logprobs, wild).astype(np.float32)

    return replace(
        experience,
        rollout_logprobs=other(experience.rollout_logprobs),
        old_logprobs=other(experience.old_logprobs),
        ref_logprobs=other(experience.ref_logprobs),
        teacher_logprobs={name: other(logprobs) for name, logprobs in experience.teacher_logprobs.items()},
    )


def worked_on(
    experiences: list[Experience], objective: ObjectivePlan, teachers: list[TeacherPlan]
) -> tuple[list[Experience], dict[str, float]]:
    """Return what the driver of a run makes of a step's experiences, and what it reports."""
    experiences = masked(experiences, objective, SamplingPlan(max_new_tokens=8))
    experiences = external_advantages(experiences, objective, 0.1, taught=bool(teachers))
    *_, kl_coef = kl_coefs(experiences, objective, 0.1)
    if objective.correction:
        experiences = corrected(experiences, teachers, objective)
    metrics = train_infer_metrics(experiences) | opd_metrics(experiences) | reward_metrics(experiences)
    metrics |= mask_metrics(experiences) | advantage_metrics(experiences, teachers, objective)
    return experiences, metrics | {"kl_coef": kl_coef}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", range(5))
def test_observed_tokens_change_nothing(name: str, seed: int) -> None:
    objective, teachers = OBJECTIVES[name]
    experiences, rng = conversations(seed), np.random.default_rng(seed)
    plain, metrics = worked_on(experiences, objective, teachers)
    wild, wild_metrics = worked_on([disturbed(one, rng) for one in experiences], objective, teachers)
    assert wild_metrics == metrics and len(metrics) > 20
    for one, other in zip(plain, wild, strict=True):
        for array in ("advantages", "loss_mask", "importance_weights"):
            values = [getattr(experience, array) for experience in (one, other)]
            if values[0] is not None:
                np.testing.assert_array_equal(*[value[one.action_mask] for value in values])
            assert values[0] is not None or values[1] is None
