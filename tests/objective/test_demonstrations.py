"""Demonstrations among the student's samples: equally many in every update, and excluded from the metrics."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, ObjectivePlan, TeacherPlan
from roll_opd.data.dataset import Prompt
from roll_opd.objective.columns import loss_columns, with_total_advantages
from roll_opd.objective.demonstrations import demonstration_samples, mixed
from roll_opd.objective.external_advantages import external_advantages, token_level_rewards
from roll_opd.samples.sample import Sample, as_columns, teacher_columns

TEACHER = TeacherPlan("t", MegatronPlan("t", ModelPlan("model"), (0,), Layout(), MicroBatchLimits()), opd_kl_coef=0.7)


def rows(count: int) -> list[Prompt]:
    return [
        Prompt(f"r{n}", n, "t", np.arange(2 + n), ground_truth=str(n), answers=(np.arange(10, 13 + n),))
        for n in range(count)
    ]


def sample(number: int, reward: float) -> Sample:
    logprobs = -np.linspace(0.1, 1.0, 4, dtype=np.float32)
    return Sample(
        id=f"p{number // 2}#0/{number % 2}",
        group_id=f"p{number // 2}#0",
        tag="t",
        domain="d",
        tokens=np.arange(6),
        prompt_length=2,
        finish_reason="stop",
        reward=reward,
        columns=as_columns(
            action_mask=np.ones(4, dtype=bool),
            rollout_logprobs=logprobs,
            old_logprobs=logprobs,
            ref_logprobs=logprobs - 0.5,
            **teacher_columns({"t": logprobs + 0.25}),
        ),
    )


def test_rows_become_experiences() -> None:
    first, second = demonstration_samples(rows(2), first_draw=7)
    assert (first.id, second.id) == ("r0#demonstration7", "r1#demonstration8")
    assert second.tokens.tolist() == [0, 1, 2, 10, 11, 12, 13]
    assert second.response_tokens.tolist() == [10, 11, 12, 13] and second.action_mask.all()
    assert (second.demonstration, second.reward, second.rollout_logprobs, second.old_logprobs) == (
        True,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(("own", "given", "updates"), [(8, 8, 1), (8, 8, 4), (12, 4, 2), (3, 9, 3)])
def test_every_update_has_its_share_of_both(own: int, given: int, updates: int) -> None:
    samples = [sample(n, 1.0) for n in range(own)]
    together = mixed(samples, demonstration_samples(rows(given), 0), updates)
    size = (own + given) // updates
    for start in range(0, len(together), size):
        part = together[start : start + size]
        assert sum(e.demonstration for e in part) == given // updates
    assert [e.id for e in together if not e.demonstration] == [e.id for e in samples]
    assert [e.id for e in together if e.demonstration] == [f"r{n}#demonstration{n}" for n in range(given)]


@pytest.mark.extras
def test_they_carry_no_advantage_and_no_reward() -> None:
    objective = ObjectivePlan(adv_estimator="step_wise_grpo", gamma=1.0, init_kl_coef=0.1, policy_loss="mix")
    own = external_advantages([sample(0, 1.0), sample(1, 0.0), sample(2, 1.0), sample(3, 0.0)], objective)
    (row,) = demonstration_samples(rows(1), 0)
    learned = row.with_columns(old_logprobs=np.full(3, -0.5, np.float32))  # as after the update
    together = mixed(own, [learned, learned], 2)
    assert [e.demonstration for e in together] == [False, False, True] * 2
    read: dict[str, Callable[[Sample], np.ndarray]] = {
        "total_advantages": lambda sample: sample.total_advantages,
        "token_level_rewards": lambda sample: token_level_rewards(sample, objective),
    }
    for name in read:

        def found(samples: list[Sample], name: str = name) -> list[np.ndarray]:
            valued = with_total_advantages(samples, [TEACHER], replace(objective, opd_kl_discount=0.5))
            return [read[name](sample) for sample in valued]

        values = found(together)
        assert not values[2].any() and not values[5].any()
        apart = found(own)
        for mine, wanted in zip([values[n] for n in (0, 1, 3, 4)], apart, strict=True):
            np.testing.assert_array_equal(mine, wanted)
            assert mine.any()
    given = loss_columns([*together[:2], row], [TEACHER], objective)
    assert [made.columns["demonstration"].all() for made in given] == [False, False, True]
    marked = given[2].columns
    assert marked.keys() == given[0].columns.keys()
    unread = ("advantages", "opd_coefficients", "opd_teacher", "old_logprobs", "ref_logprobs", "rewards")
    assert not any(marked[name].any() for name in unread if name in marked)


@pytest.mark.extras
def test_a_run_of_one_step_is_grpo() -> None:
    """`step_wise_grpo` where each sample is the one step of its run: the mean of its group is its baseline."""
    made = [sample(n, reward) for n, reward in enumerate((1.0, 0.0, 0.5, 0.5, 0.0, 2.0))]
    stepwise = external_advantages(made, ObjectivePlan(adv_estimator="step_wise_grpo", gamma=1.0))
    grpo = ObjectivePlan(adv_estimator="grpo", gamma=1.0)
    for one, other in zip(stepwise, external_advantages(made, grpo), strict=True):
        np.testing.assert_allclose(one.advantages, other.advantages, rtol=1e-12)
    rewards = np.array([1.0, 0.0])
    wanted = (1.0 - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert stepwise[0].advantages == pytest.approx([wanted] * 4, rel=1e-12)
