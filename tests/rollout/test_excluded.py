"""Samples whose reward failed, with `on_error: drop`, have no effect."""

from dataclasses import replace

import numpy as np
import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import CorrectionPlan, ObjectivePlan
from roll_opd.objective.columns import loss_columns, value_columns, with_total_advantages
from roll_opd.objective.corrections import corrected
from roll_opd.objective.external_advantages import external_advantages
from roll_opd.objective.registry import ADVANTAGES
from roll_opd.samples.sample import Sample, as_columns
from roll_opd.tracking.sample_metrics import advantage_metrics

REWARDS = {"g0": (3.0, 0.0, 5.0, 1.0), "g1": (7.0, 2.0, 2.0, 4.0), "g2": (9.0,)}
FAILED = {"g0": {1}, "g1": {0, 1, 3}, "g2": set()}  # of g1 one sample is left


def samples() -> list[Sample]:
    rng = np.random.default_rng(3)
    found = []
    for group, rewards in REWARDS.items():
        for number, reward in enumerate(rewards):
            length = int(rng.integers(2, 6))
            failed = number in FAILED[group]
            found.append(
                Sample(
                    id=f"{group}/{number}",
                    group_id=group,
                    tag="t",
                    domain="d",
                    tokens=rng.integers(1, 9, 2 + length),
                    prompt_length=2,
                    finish_reason="stop",
                    reward=None if failed else reward,
                    excluded=failed,
                    columns=as_columns(
                        action_mask=np.ones(length, bool),
                        rollout_logprobs=rng.normal(-1, 0.1, length).astype(np.float32),
                        old_logprobs=rng.normal(-1, 0.1, length).astype(np.float32),
                        values=rng.normal(0, 1, length).astype(np.float32),
                    ),
                )
            )
    return found


@pytest.mark.extras
@pytest.mark.parametrize(
    ("estimator", "level"),
    [
        *[(name, "group") for name in ("grpo", "rloo", "opmd", "asymre", "reinforce")],
        *[(name, "batch") for name in ("grpo", "reinforce")],
        *[(name, None) for name in ("reinforce", "reinforceplusplus", "gae")],
    ],
)
def test_the_others_learn_as_if_it_were_not_there(estimator: str, level: str | None) -> None:
    levels = {"mean_cal_level": level, "std_cal_level": level}
    taken = FrozenDict(levels if levels.keys() <= ADVANTAGES.defaults(estimator).keys() else {})
    objective = ObjectivePlan(adv_estimator=estimator, gamma=1.0, advantage_args=taken)
    found = external_advantages(samples(), objective)
    without = [sample for sample in samples() if not sample.excluded]
    expected = {sample.id: sample for sample in external_advantages(without, objective)}
    for sample in found:
        if sample.excluded:
            assert not sample.advantages.any() and not sample.loss_mask.any()
        elif level == "group" and sample.group_id == "g1":
            assert not sample.advantages.any() and sample.loss_mask is None
        else:
            np.testing.assert_array_equal(sample.advantages, expected[sample.id].advantages)
            assert sample.loss_mask is None
    (single,) = (sample for sample in found if sample.group_id == "g2")
    assert single.advantages.any()  # it never had others


def test_none_of_its_tokens_counts_in_an_update() -> None:
    objective = ObjectivePlan(adv_estimator="gae", correction=CorrectionPlan())
    found = corrected(external_advantages(samples(), objective), (), objective)
    for sample, train, value in zip(found, loss_columns(found, (), objective), value_columns(found), strict=True):
        assert train.columns["mask"].any() == value.columns["mask"].any() == (not sample.excluded)
        assert np.isfinite(train.columns["advantages"]).all() and "rewards" in train.columns


def test_it_counts_in_no_metric() -> None:
    objective = ObjectivePlan(
        adv_estimator="grpo", advantage_args=FrozenDict({"mean_cal_level": "group", "std_cal_level": None})
    )
    found = external_advantages(samples(), objective)
    counted = [sample for sample in found if not sample.excluded]
    of_all, of_counted = (
        advantage_metrics(with_total_advantages(each, (), objective), objective) for each in (found, counted)
    )
    assert of_all == of_counted != {}


def test_all_may_be_left_out() -> None:
    objective = ObjectivePlan(adv_estimator="grpo")
    nothing = [replace(sample, reward=None, excluded=True) for sample in samples()]
    assert not any(sample.loss_mask.any() for sample in external_advantages(nothing, objective))
