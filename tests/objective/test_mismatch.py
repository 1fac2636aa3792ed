"""The mismatch of a step is computed over its action tokens, in samples that the training engine has scored."""

import math
from dataclasses import replace
from types import SimpleNamespace

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
    TokenFilterPlan,
)
from roll_opd.objective.aggregation import token_weights
from roll_opd.objective.columns import loss_columns
from roll_opd.objective.corrections import check_staleness, corrected, train_infer_metrics
from roll_opd.samples.sample import Sample, as_columns, changed, teacher_columns


def experience(rollout: list[float], train: list[float] | None, mask: list[bool]) -> Sample:
    return Sample(
        id="a",
        group_id="a",
        tag="t",
        domain="d",
        tokens=np.arange(2 + len(mask)),
        prompt_length=2,
        finish_reason="stop",
        columns=as_columns(
            action_mask=np.array(mask),
            rollout_logprobs=np.array(rollout, np.float32),
            old_logprobs=None if train is None else np.array(train, np.float32),
        ),
    )


def test_over_the_samples_of_a_step() -> None:
    batch = [
        experience([-1.0, -9.0, -2.0], [-1.5, -math.inf, -2.0], [True, False, True]),
        experience([-1.0], None, [True]),
        experience([-3.0], [-2.75], [True]),
    ]
    metrics = train_infer_metrics(batch)
    gaps = [-0.5, 0.0, 0.25]
    assert metrics["rollout/mismatch/logprob_diff_mean"] == pytest.approx(0.25)
    assert metrics["rollout/mismatch/k1"] == pytest.approx(-sum(gaps) / 3)
    assert metrics["rollout/mismatch/ratio_max"] == pytest.approx(math.exp(0.25))
    assert train_infer_metrics([batch[1]]) == train_infer_metrics([]) == {}


OPD = TeacherPlan("t", MegatronPlan("t", ModelPlan("m"), (0,), Layout(), MicroBatchLimits()), 0.7)
FILTERS = (TokenFilterPlan("ratio", "token", 0.8, 1.3), TokenFilterPlan("difference", "segment", -0.1, None))
CORRECTIONS = [
    CorrectionPlan("tis", level, high=high)
    for level in ("token", "segment", "geometric", "sequence")
    for high in (1.1, None)
] + [
    CorrectionPlan("icepop", low=0.8, high=1.25),
    CorrectionPlan("icepop", "geometric", low=0.9, high=None),
    CorrectionPlan(filters=FILTERS),
    CorrectionPlan(filters=(TokenFilterPlan("ratio", "sequence", None, 1.0),)),
    CorrectionPlan(negatives_delta=0.05),
    CorrectionPlan("tis", high=1.1, filters=FILTERS, negatives_delta=0.05),
]


def sampled(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    made = []
    for length in (5, 9, 1, 7, 3):
        mask = rng.random(length) > 0.3
        infer = -rng.random(length) * 2
        train = np.minimum(infer + rng.normal(0, 0.4, length), -0.01)
        one = experience(list(infer), list(train), list(mask))
        made.append(one.with_columns(**teacher_columns({"t": (-rng.random(length) * 2).astype(np.float32)})))
    return made


def naive_correction(e: Sample, plan: CorrectionPlan) -> tuple[list[bool], list[float]]:
    """(kept, weight) of each token, by loops in float64."""
    train, infer = e.old_logprobs.astype(float), e.rollout_logprobs.astype(float)
    actions = [t for t in range(len(train)) if e.action_mask[t]]

    def members(t: int, level: str) -> list[int]:
        if level == "segment":
            first = last = t
            while first - 1 in actions:
                first -= 1
            while last + 1 in actions:
                last += 1
            return list(range(first, last + 1))
        return [t] if level == "token" else actions

    def measured(t: int, level: str, measure: str) -> float:
        among = members(t, level)
        count = 1 if level == "sequence" else len(among)
        if measure == "ratio":
            return math.exp(sum(train[n] - infer[n] for n in among) / count)
        return sum(math.exp(train[n]) - math.exp(infer[n]) for n in among) / count

    def within(value: float, low: float | None, high: float | None) -> bool:
        return (low is None or value >= low) and (high is None or value <= high)

    kept, weights = [], []
    for t in range(len(train)):
        if t not in actions:
            kept.append(False)
            weights.append(1.0)
            continue
        far = sum(infer[n] - train[n] for n in actions) / len(actions)
        negative = 0.7 * (float(e.teacher_logprobs["t"][t]) - train[t]) < 0
        lost = plan.negatives_delta is not None and negative and far > plan.negatives_delta
        kept.append(
            not lost
            and all(within(measured(t, rule.level, rule.measure), rule.low, rule.high) for rule in plan.filters)
        )
        ratio = measured(t, plan.level, "ratio")
        if plan.weight == "tis":
            weights.append(ratio if plan.high is None else min(ratio, plan.high))
        elif plan.weight == "icepop":
            weights.append(ratio if within(ratio, plan.low, plan.high) else 0.0)
        else:
            weights.append(1.0)
    return kept, weights


@pytest.mark.parametrize("plan", CORRECTIONS)
def test_corrected_samples_and_their_loss(plan: CorrectionPlan) -> None:
    """Masks, weights and the loss they make, -Σ weight · A / (tokens that are left)."""
    objective = ObjectivePlan(correction=plan)
    made = sampled(3)
    found = corrected(made, [OPD], objective)
    samples = [SimpleNamespace(**sample.columns) for sample in loss_columns(found, [OPD], objective)]
    shares = token_weights([torch.from_numpy(sample.mask) for sample in samples], "token-mean")
    loss = wanted = 0.0
    left = 0
    for e, after, sample, share in zip(made, found, samples, shares, strict=True):
        kept, weights = naive_correction(e, plan)
        assert after.loss_mask.tolist() == sample.mask.tolist() == kept
        assert after.importance_weights == pytest.approx(weights, rel=1e-6)
        assert after.action_mask is e.action_mask
        assert sample.weight.tolist() == share.tolist()
        gains = sample.opd_teacher - sample.opd_coefficients * sample.old_logprobs
        loss -= float((share.double().numpy() * sample.importance_weights * gains).sum())
        for t, keeps in enumerate(kept):
            left += keeps
            wanted -= keeps * weights[t] * 0.7 * (float(e.teacher_logprobs["t"][t]) - float(e.old_logprobs[t]))
        alone = corrected([e], [OPD], objective)[0]
        assert alone.loss_mask.tolist() == after.loss_mask.tolist()  # nobody else's business
        assert alone.importance_weights.tolist() == after.importance_weights.tolist()
    assert loss == pytest.approx(wanted / left, rel=1e-5)
    metrics = train_infer_metrics(found, plan)
    acted = sum(int(e.action_mask.sum()) for e in made)
    assert metrics["rollout/correction/masked_rate"] == pytest.approx(1 - left / acted)
    used = [w for e in found for w, keeps in zip(e.importance_weights, e.loss_mask, strict=True) if keeps]
    assert metrics["rollout/correction/weight_mean"] == pytest.approx(float(np.mean(used)), rel=1e-6)
    effective = sum(used) ** 2 / (acted * sum(w * w for w in used)) if any(used) else 0.0
    assert metrics["rollout/correction/ess"] == pytest.approx(effective, rel=1e-6)
    if plan.weight:
        raw = [naive_correction(e, replace(plan, high=None, low=None))[1] for e in made]
        pairs = zip(made, raw, (naive_correction(e, plan)[1] for e in made), strict=True)
        clipped = sum(a and r != w for e, rs, ws in pairs for a, r, w in zip(e.action_mask, rs, ws, strict=True))
        assert metrics["rollout/correction/clipped_rate"] == pytest.approx(clipped / acted)


def test_the_corrections_do_something() -> None:
    """Guards the test above: each of its rules masks or weights some tokens, and not all of them equally."""
    for plan in CORRECTIONS:
        found = corrected(sampled(3), [OPD], ObjectivePlan(correction=plan))
        kept = np.concatenate([e.loss_mask[e.action_mask] for e in found])
        weights = np.concatenate([e.importance_weights[e.action_mask] for e in found])
        assert kept.any() and (not kept.all() or len(np.unique(weights)) > 2), plan


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("name", ["old_logprobs", "rollout_logprobs"])
def test_what_is_not_finite_is_not_left_out(name: str, value: float) -> None:
    """The update must be skipped, and would not be if a filter took such a token away."""
    made = sampled(3)
    place = int(np.flatnonzero(made[1].action_mask)[0])
    getattr(made[1], name)[place] = value
    plan = CorrectionPlan("tis", high=1.2, filters=(TokenFilterPlan("ratio", "token", 0.8, 1.2),))
    found = corrected(made, [OPD], ObjectivePlan(correction=plan))
    assert found[1].loss_mask[place] and np.isnan(found[1].importance_weights[place])
    assert sum(int(np.isnan(e.importance_weights).sum()) for e in found) == 1


CURRENT, STALE, MIXED = ((4, 2),), ((3, 2),), ((3, 1), (4, 1))


@pytest.mark.parametrize("old", [[-1.0, -1.0], None], ids=["old log-probs", "none"])
@pytest.mark.parametrize("versions", [STALE, MIXED, ()], ids=["stale", "mixed", "unknown"])
def test_samples_of_other_weights_are_refused_without_importance_weights(versions: tuple, old: list | None) -> None:
    sample = changed(experience([-1, -2], old, [True, True]), versions=versions)
    current = changed(sample, versions=CURRENT)
    check_staleness([current, changed(current, versions=((4, 1), (None, 1)))], version=4, updates=0)
    with pytest.raises(RunError, match=r"1 of 2 samples .* student is at version 4.*Set train_infer_correction"):
        check_staleness([current, sample], version=4, updates=0)
    not_learned = sample.with_columns(loss_mask=np.zeros(2, bool))
    given = changed(sample, demonstration=True).with_columns(rollout_logprobs=None)
    weighted = sample.with_columns(importance_weights=np.ones(2, np.float32))
    check_staleness([not_learned, given, weighted], version=4, updates=0)


def test_a_second_update_needs_old_logprobs() -> None:
    first = changed(experience([-1, -2], None, [True, True]), versions=CURRENT)
    check_staleness([first], version=4, updates=0)
    with pytest.raises(RunError, match="update 2 of a step have no old log-probs"):
        check_staleness([first], version=4, updates=1)
    check_staleness([first.with_columns(old_logprobs=np.zeros(2, np.float32))], version=4, updates=1)
