"""The filters of groups and of responses."""

from dataclasses import replace

import numpy as np
import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import FilterPlan, RewardPlan
from roll_opd.objective.filters import group_filter, without_rejected
from roll_opd.samples.sample import Sample, as_columns

MEAN = FilterPlan("mean_filter", FrozenDict({"threshold_down": 0.1, "threshold_up": 0.95}))
STD = FilterPlan("std_filter", FrozenDict({"std_threshold": 0.0}))


def sample(group: int, number: int, reward: float | None, domain: str = "math") -> Sample:
    return Sample(
        id=f"{group}/{number}",
        group_id=str(group),
        tag="t",
        domain=domain,
        tokens=np.arange(3),
        prompt_length=2,
        finish_reason="stop",
        reward=reward,
        columns=as_columns(action_mask=np.ones(1, bool), rollout_logprobs=np.zeros(1, np.float32)),
    )


@pytest.mark.parametrize(
    ("query", "response", "rewards", "passes"),
    [
        (MEAN, None, [1, 1, 1, 1], False),
        (MEAN, None, [0, 0, 0, 0], False),
        (MEAN, None, [1, 0, 0, 0], True),
        (STD, None, [1, 1, 1, 1], False),
        (STD, None, [1, 1, 1, 0], True),
        (None, MEAN, [0.5, 0.5, 0.05, 0.5], False),
        (None, MEAN, [0.5, 0.5, 0.9, 0.5], True),
        (MEAN, None, [None, None], True),
        (MEAN, None, [None, 1.0], False),
    ],
)
def test_groups_pass_the_filters_of_their_domain(query, response, rewards, passes: bool) -> None:
    passes_filter = group_filter([RewardPlan("math", (), query_filter=query, response_filter=response)])
    assert passes_filter([sample(0, k, reward) for k, reward in enumerate(rewards)]) is passes
    assert passes_filter([sample(0, k, reward, domain="other") for k, reward in enumerate(rewards)])


def test_where_nothing_is_compared_a_response_goes_alone() -> None:
    """Rejection sampling, as in RAFT: rejected samples have no trained token; other samples of the prompt are kept."""
    rewards = [RewardPlan("math", (), response_filter=MEAN)]
    passes_filter = group_filter(rewards, compared=False)
    assert [passes_filter([sample(0, k, r) for k, r in enumerate(group)]) for group in ([1, 0], [0, 0.5])] == [
        False,
        True,
    ]
    made = [sample(0, k, reward) for k, reward in enumerate([0.5, 1.0, 0.0, None])] + [sample(1, 0, 1.0, "other")]
    found = without_rejected(made, rewards)
    assert [e.loss_mask is None for e in found] == [True, False, False, True, True]
    assert not any(e.loss_mask.any() for e in found if e.loss_mask is not None)


def test_kinds_of_samples_are_filtered_apart() -> None:
    """All answers are right and all judgements are wrong: as one kind, they would differ and pass."""
    for filter_ in (MEAN, STD):
        passes = group_filter([RewardPlan("math", (), query_filter=filter_)])
        for judged, expected in (([0.0, 0.0], False), ([0.0, 1.0], True), ([None, None], False)):
            answers = [sample(0, number, 1.0) for number in range(2)]
            judgements = [replace(sample(0, n, reward), group_id="0:judged") for n, reward in enumerate(judged)]
            assert passes([*answers, *judgements]) is expected


def test_without_a_filter_there_is_no_test() -> None:
    assert group_filter([RewardPlan("math", ())]) is None


def test_a_group_with_a_failure_is_replaced_if_its_domain_says_so() -> None:
    passes = group_filter([RewardPlan("math", (), on_error="replace"), RewardPlan("code", (), on_error="drop")])
    failed = {domain: replace(sample(0, 1, None, domain), excluded=True) for domain in ("math", "code")}
    assert passes([sample(0, 0, 1.0), sample(0, 1, 0.0)])
    assert not passes([sample(0, 0, 1.0), failed["math"]])
    assert passes([sample(0, 0, 1.0, "code"), failed["code"]])
    by_runs = group_filter([], runs=2)
    assert by_runs([replace(sample(0, run, None), run=run) for run in range(2)])
    assert not by_runs([sample(0, 0, None), sample(0, 0, None)])
