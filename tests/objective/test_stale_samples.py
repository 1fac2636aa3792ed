"""Samples of older weights: the teachers' part comes from current log-probs, and the reward's part alone is weighed."""

import numpy as np
import pytest
import torch

from roll_opd.base.failures import RunError
from roll_opd.config.plan import (
    CorrectionPlan,
    Layout,
    MegatronPlan,
    MicroBatchLimits,
    ModelPlan,
    ObjectivePlan,
    TeacherPlan,
)
from roll_opd.objective.columns import loss_columns
from roll_opd.objective.loss import opd_loss
from roll_opd.objective.mismatch import check_staleness, corrected
from roll_opd.samples.sample import Sample, changed
from roll_opd.samples.sample_columns import as_columns, teacher_columns

COEF, BOUND = 0.7, 1.2
TEACHER = TeacherPlan("t", MegatronPlan("t", ModelPlan("m"), (0,), Layout(), MicroBatchLimits()), COEF)
PURE = ObjectivePlan(max_age=2)
MIXED = ObjectivePlan(max_age=2, correction=CorrectionPlan("tis", high=BOUND), loss_normaliser=1.0)


def stale(seed: int, *, rewarded: bool, poison: float = 0.0) -> list[Sample]:
    rng, made = np.random.default_rng(seed), []
    for number, length in enumerate((4, 1, 6)):
        rollout = -rng.random(length).astype(np.float32) + np.float32(poison)
        old = -rng.random(length).astype(np.float32) if rewarded else None
        columns = as_columns(action_mask=rng.random(length) > 0.2, rollout_logprobs=rollout, old_logprobs=old)
        columns |= teacher_columns({"t": -rng.random(length).astype(np.float32)})
        if rewarded:
            columns["advantages"] = np.full(length, rng.normal())
        made.append(Sample(np.arange(length + 2), 2, columns, id=str(number), versions=((3 + number % 2, length),)))
    return made


def gradient(samples: list[Sample], objective: ObjectivePlan, logprobs: list[np.ndarray]) -> torch.Tensor:
    """Gradient of the loss by the log-prob of each token, end to end."""
    made = loss_columns(samples, [TEACHER], objective)
    columns = {name: torch.from_numpy(np.concatenate([s.columns[name] for s in made])) for name in made[0].columns}
    logprobs_M = torch.from_numpy(np.concatenate(logprobs)).requires_grad_()
    lengths = [sample.response_length for sample in samples]
    loss, _ = opd_loss(logprobs_M, columns, lengths, objective=objective, arguments={}, step=1)
    loss.backward()
    return logprobs_M.grad


def now_of(samples: list[Sample], seed: int = 9) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [-rng.random(sample.response_length).astype(np.float32) for sample in samples]


@pytest.mark.parametrize("poison", [0.0, 100.0, -100.0])
def test_the_teachers_part_is_formed_from_current_logprobs(poison: float) -> None:
    """The advantage is -coef · (l_now - q); log-probs of sampling time have no influence, whatever they are."""
    samples = stale(1, rewarded=False, poison=poison)
    now = now_of(samples)
    check_staleness(samples, version=5, updates=0, max_age=2)
    found = gradient(samples, PURE, now)
    mask = np.concatenate([sample.action_mask for sample in samples])
    teacher = np.concatenate([sample.teacher_logprobs["t"] for sample in samples])
    wanted = np.where(mask, COEF * (np.concatenate(now) - teacher), 0) / mask.sum()
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6)


def test_importance_weights_multiply_the_rewards_part_alone() -> None:
    samples = corrected(stale(2, rewarded=True), [TEACHER], MIXED)
    check_staleness(samples, version=5, updates=0, max_age=2)
    now = [sample.old_logprobs for sample in samples]  # of a first update
    found = gradient(samples, MIXED, now).numpy()
    wanted, counted = [], sum(int(sample.action_mask.sum()) for sample in samples)
    for sample in samples:
        for t in range(sample.response_length):
            weight = min(float(np.exp(np.float64(sample.old_logprobs[t]) - sample.rollout_logprobs[t])), BOUND)
            penalty = COEF * (float(sample.old_logprobs[t]) - float(sample.teacher_logprobs["t"][t]))
            advantage = weight * float(sample.advantages[t]) - penalty
            wanted.append(-advantage / counted if sample.action_mask[t] else 0.0)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_samples_beyond_the_promised_age_are_refused() -> None:
    (sample, *_) = stale(3, rewarded=False)
    check_staleness([sample], version=5, updates=0, max_age=2)
    for versions in (((2, 4),), ((2, 1), (5, 3)), ((6, 4),), ()):
        with pytest.raises(RunError, match="async_generation_ratio guarantees an age of at most 2"):
            check_staleness([changed(sample, versions=versions)], version=5, updates=0, max_age=2)


def test_a_stale_reward_without_importance_weights_is_refused() -> None:
    samples = stale(4, rewarded=True)
    with pytest.raises(RunError, match="Set train_infer_correction"):
        check_staleness(samples, version=5, updates=0, max_age=2)
