"""Samples of older weights: the teachers' part comes from current log-probs, and each part has weights of its own."""

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
from roll_opd.objective.columns import loss_columns, with_total_advantages
from roll_opd.objective.corrections import check_staleness, corrected
from roll_opd.objective.opd_loss import opd_loss
from roll_opd.objective.reverse_kl import STALE_LIMIT
from roll_opd.samples.sample import Sample, as_columns, changed, teacher_columns

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
    loss, *_ = opd_loss(logprobs_M, columns, lengths, objective=objective, arguments={}, step=1)
    loss.backward()
    return logprobs_M.grad


def now_of(samples: list[Sample], seed: int = 9) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [-rng.random(sample.response_length).astype(np.float32) for sample in samples]


def stale_weight(now: float, sampling: float) -> float:
    return min(float(np.exp(np.float64(now) - sampling)), STALE_LIMIT)


@pytest.mark.parametrize("offset", [0.0, 100.0, -100.0])
def test_the_teachers_part_is_formed_from_current_logprobs(offset: float) -> None:
    """The advantage is -w · coef · (l_now - q) with w = exp(l_now - l_sampling), from 0 to the limit."""
    samples = stale(1, rewarded=False, poison=offset)
    now = now_of(samples)
    check_staleness(samples, version=5, updates=0, max_age=2)
    found = gradient(samples, PURE, now)
    wanted, counted = [], sum(int(sample.action_mask.sum()) for sample in samples)
    for sample, logprobs in zip(samples, now, strict=True):
        for t in range(sample.response_length):
            weight = stale_weight(logprobs[t], sample.rollout_logprobs[t])
            penalty = weight * COEF * (float(logprobs[t]) - float(sample.teacher_logprobs["t"][t]))
            wanted.append(penalty / counted if sample.action_mask[t] else 0.0)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)


def test_tokens_of_older_weights_have_the_gradient_of_the_current_kl() -> None:
    """The expectation over all tokens that the older weights may sample is the gradient of KL(student, teacher).

    Without the weights, it is not: the mean penalty then pushes away from the older weights.
    """
    generator = torch.Generator().manual_seed(0)
    logits, old, teacher = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    now, sampling, q = logits.log_softmax(0), old.log_softmax(0), teacher.log_softmax(0)
    (wanted,) = torch.autograd.grad((now.exp() * (now - q)).sum(), logits, retain_graph=True)
    columns = {
        "mask": torch.ones(7, dtype=torch.bool),
        "weight": sampling.exp(),  # the expectation over the older weights' tokens
        "advantages": torch.zeros(7),
        "opd_coefficients": torch.ones(7),
        "opd_teacher": q,
    }
    found = {}
    for name, more in {"weighted": {"sampling_logprobs": sampling}, "not": {}}.items():
        loss, *_ = opd_loss(now, columns | more, [7], objective=PURE, arguments={}, step=1)
        (found[name],) = torch.autograd.grad(loss, logits, retain_graph=True)
    torch.testing.assert_close(found["weighted"], wanted)
    assert (found["not"] - wanted).abs().max() > 0.05


def test_a_sample_without_sampled_tokens_changes_no_gradient() -> None:
    samples = stale(6, rewarded=False)
    columns = as_columns(action_mask=np.zeros(3, bool)) | teacher_columns({"t": -np.ones(3, np.float32)})
    empty = Sample(np.arange(5), 2, columns, id="empty")
    now = now_of([*samples, empty])
    found = gradient([*samples, empty], PURE, now)
    assert torch.equal(found[:-3], gradient(samples, PURE, now[:-1])) and not found[-3:].any()


def test_advantages_without_an_update_are_those_of_the_update() -> None:
    made = stale(5, rewarded=False)
    samples = [sample.with_columns(old_logprobs=now) for sample, now in zip(made, now_of(made), strict=True)]
    found = gradient(samples, PURE, [sample.old_logprobs for sample in samples])
    counted = sum(int(sample.action_mask.sum()) for sample in samples)
    shown = np.concatenate([s.total_advantages for s in with_total_advantages(samples, [TEACHER], PURE)])
    np.testing.assert_allclose(found.numpy(), -shown / counted, atol=1e-6)


def test_the_weights_of_the_correction_multiply_the_rewards_part_alone() -> None:
    samples = corrected(stale(2, rewarded=True), [TEACHER], MIXED)
    check_staleness(samples, version=5, updates=0, max_age=2)
    now = [sample.old_logprobs for sample in samples]  # of a first update
    found = gradient(samples, MIXED, now).numpy()
    wanted, counted = [], sum(int(sample.action_mask.sum()) for sample in samples)
    for sample in samples:
        for t in range(sample.response_length):
            weight = min(float(np.exp(np.float64(sample.old_logprobs[t]) - sample.rollout_logprobs[t])), BOUND)
            stale_part = stale_weight(sample.old_logprobs[t], sample.rollout_logprobs[t])
            penalty = stale_part * COEF * (float(sample.old_logprobs[t]) - float(sample.teacher_logprobs["t"][t]))
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
