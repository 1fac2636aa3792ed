"""Columns of the loss against loops over tokens, written from the formulas."""

import numpy as np
import pytest

from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, ObjectivePlan, TeacherPlan
from roll_opd.objective.columns import loss_columns
from roll_opd.samples.sample import Sample, TargetRef, as_columns, teacher_columns

WORKER = MegatronPlan("", ModelPlan(""), (0,), Layout(), MicroBatchLimits())
COEFFICIENTS = {"a": 0.7, "b": 1.5}
TEACHERS = [TeacherPlan(name, WORKER, coefficient) for name, coefficient in COEFFICIENTS.items()]


def experiences(*, targets: bool) -> list[Sample]:
    """Return samples of no teacher, of one and of both, with observed and filtered tokens."""
    rng, made = np.random.default_rng(0), []
    for number, names in enumerate(((), ("a",), ("b",), ("a", "b"))):
        length = 6 + number
        made.append(
            Sample(
                id=str(number),
                group_id="g",
                tokens=rng.integers(0, 9, 3 + length),
                prompt_length=3,
                finish_reason="stop",
                teacher_targets={name: TargetRef(None, 0, {}) for name in names} if targets else {},
                columns=as_columns(
                    action_mask=rng.random(length) < 0.8,
                    loss_mask=rng.random(length) < 0.7,
                    rollout_logprobs=None,
                    **teacher_columns({name: -rng.random(length, np.float32) for name in names}),
                ),
            )
        )
    return made


def test_teachers_are_merged_with_their_coefficients_at_action_tokens() -> None:
    made = experiences(targets=False)
    for e, sample in zip(made, loss_columns(made, TEACHERS, ObjectivePlan()), strict=True):
        for t, acts in enumerate(e.action_mask):
            total = sum(COEFFICIENTS[name] for name in e.teacher_logprobs) if acts else 0
            weighted = sum(COEFFICIENTS[name] * float(q[t]) for name, q in e.teacher_logprobs.items()) if acts else 0
            assert sample.columns["opd_coefficients"][t] == pytest.approx(total, rel=1e-6)
            assert sample.columns["opd_teacher"][t] == pytest.approx(weighted, rel=1e-6)
        assert not any(name.endswith("/share") for name in sample.columns)


def test_a_share_is_the_coefficient_at_learned_tokens_with_targets() -> None:
    made = experiences(targets=True)
    for e, sample in zip(made, loss_columns(made, TEACHERS, ObjectivePlan(opd_objective="topk")), strict=True):
        for name, coefficient in COEFFICIENTS.items():
            wanted = [coefficient if learned and name in e.teacher_targets else 0 for learned in e.loss_mask]
            assert sample.columns[f"{name}/share"].tolist() == pytest.approx(wanted, rel=1e-6)
        assert not sample.columns["opd_coefficients"].any() and not sample.columns["opd_teacher"].any()


def test_weights_sum_to_one_over_learned_tokens() -> None:
    samples = loss_columns(experiences(targets=False), TEACHERS, ObjectivePlan(loss_agg_mode="token-mean"))
    learned = sum(int(sample.columns["mask"].sum()) for sample in samples)
    for sample in samples:
        assert sample.columns["weight"].tolist() == pytest.approx((sample.columns["mask"] / learned).tolist(), rel=1e-6)


def test_samples_that_differ_in_what_the_loss_reads_are_refused() -> None:
    made = experiences(targets=False)
    made[1] = made[1].with_columns(old_logprobs=np.zeros(made[1].response_length, np.float32))
    with pytest.raises(ValueError, match="3 of 4 samples of an update have no old_logprobs"):
        loss_columns(made, TEACHERS, ObjectivePlan())
