"""Token rewards and advantages against loops written from the formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from roll_opd.base.failures import RunError
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, ObjectivePlan, TeacherPlan
from roll_opd.objective.advantages.reward_normalisation import normalised_rewards
from roll_opd.objective.columns import with_total_advantages
from roll_opd.objective.external_advantages import external_advantages, token_level_rewards
from roll_opd.objective.returns_and_gae import clipped, on_last_action, token_advantages, whitening
from roll_opd.samples.sample import Sample, as_columns, teacher_columns
from roll_opd.tracking.sample_metrics import advantage_metrics

GROUPS = ["a", "a", "b", "c", "c", "c", "a"]  # b stands alone


def teacher(name: str, coefficient: float) -> TeacherPlan:
    worker = MegatronPlan(name, ModelPlan("model"), (0,), Layout(), MicroBatchLimits())
    return TeacherPlan(name, worker, coefficient)


def samples(seed: int) -> list[Sample]:
    """With holes in the mask, one without any action, and each scored by one teacher, the other or both."""
    rng = np.random.default_rng(seed)
    made = []
    for number, group in enumerate(GROUPS):
        length = int(rng.integers(1, 9))
        mask = rng.random(length) < 0.7
        mask[:] = False if number == 3 else mask
        scored = [("one",), ("two",), ("one", "two")][number % 3]

        def logprobs(length: int = length) -> np.ndarray:
            return -rng.exponential(size=length).astype(np.float32)

        made.append(
            Sample(
                id=f"{group}/{number}",
                group_id=group,
                tag="t",
                domain="d",
                tokens=np.arange(3 + length),
                prompt_length=3,
                finish_reason="stop",
                reward=float(rng.normal()),
                columns=as_columns(
                    action_mask=mask,
                    rollout_logprobs=logprobs(),
                    old_logprobs=logprobs(),
                    ref_logprobs=logprobs(),
                    **teacher_columns({name: logprobs() for name in scored}),
                ),
            )
        )
    return made


def naive_norm(rewards: list[float], groups: list[str], mean_over: str | None, std_over: str | None) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        families = {"group": [r for r, g in zip(rewards, groups, strict=True) if g == group], "batch": rewards}
        mean, scale = 0.0, 1.0
        if mean_over and len(families[mean_over]) > 1:
            mean = sum(families[mean_over]) / len(families[mean_over])
        if std_over and len(family := families[std_over]) > 1:
            centre = sum(family) / len(family)
            scale = math.sqrt(sum((r - centre) ** 2 for r in family) / (len(family) - 1)) + 1e-6
            if len(set(family)) == 1:  # nothing to divide by
                mean = reward
        result.append((reward - mean) / scale)
    return result


@pytest.mark.parametrize("mean_over", [None, "group", "batch"])
@pytest.mark.parametrize("std_over", [None, "group", "batch"])
def test_normalised_rewards(mean_over: str | None, std_over: str | None) -> None:
    rewards = [0.0, 1.0, 0.3, 1.0, 1.0, 1.0, 0.5]
    found = normalised_rewards(torch.tensor(rewards), GROUPS, mean_over, std_over)
    wanted = naive_norm([float(torch.tensor(r)) for r in rewards], GROUPS, mean_over, std_over)
    assert found.rewards.tolist() == pytest.approx(wanted, abs=1e-12)
    again = (torch.tensor(rewards).double() - found.mean) / found.scale
    assert torch.equal(again, found.rewards)
    assert normalised_rewards(torch.ones(1), ["x"], "group", "group").rewards.tolist() == [1.0]


def test_equal_rewards_teach_nothing() -> None:
    found = normalised_rewards(torch.ones(4), ["a"] * 4, "group", "group")
    assert not found.rewards.any()
    found = normalised_rewards(torch.tensor([0.1, 0.1, 0.1, 5.0]), ["a"] * 3 + ["b"], "batch", "group")
    assert not found.rewards[:3].any() and found.rewards[3] > 1  # not a third of a million


def test_reward_sits_on_the_last_action() -> None:
    masks = [torch.tensor(m, dtype=torch.bool) for m in ([1, 0, 1, 0], [0, 0], [1], [])]
    found = on_last_action(torch.tensor([2.0, 3.0, 4.0, 5.0]), masks)
    assert found.tolist() == [0, 0, 2, 0, 0, 0, 4]
    assert on_last_action(torch.zeros(0), []).shape == (0,)


def test_whitening_needs_two_tokens() -> None:
    values = torch.tensor([1.0, 100.0, 3.0])
    mean, scale = whitening(values, torch.tensor([True, False, True]))
    assert (mean, scale) == (2.0, pytest.approx(math.sqrt(2 + 1e-8), abs=1e-15))
    assert whitening(values, torch.tensor([True, False, False])) == (0.0, 1.0)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_whitening_leaves_out_what_is_not_finite(spoilt: float) -> None:
    values, kept = torch.tensor([1.0, spoilt, 4.0, 9.0]), torch.tensor([True, True, True, False])
    assert whitening(values, kept) == whitening(values[[0, 2]], kept[[0, 2]])


def test_one_sample_that_is_not_finite_spoils_no_other() -> None:
    rewards, mask = torch.tensor([1.0, math.nan, 2.0, 5.0]).double(), torch.ones(4, dtype=torch.bool)
    found = token_advantages(rewards, mask, [2, 1, 1], whiten_rewards=True, whiten_advantages=True)
    assert found.advantages_M.isfinite().tolist() == [False, False, True, True]


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize(
    "objective",
    [
        ObjectivePlan(norm_mean_type="group", norm_std_type="group"),
        ObjectivePlan(gamma=0.9, reward_clip=0.5, advantage_clip=0.4),
        ObjectivePlan(gamma=0.0, norm_mean_type="batch", init_kl_coef=0.3, kl_penalty="low_var_kl"),
        ObjectivePlan(gamma=1.0, whiten_rewards=True),
    ],
)
def test_token_advantages_of_a_step_equal_the_loop(objective: ObjectivePlan, whiten: bool, discount: float) -> None:
    levels = {"mean_cal_level": objective.norm_mean_type, "std_cal_level": objective.norm_std_type}
    objective = replace(objective, adv_estimator="reinforce", advantage_args=FrozenDict(levels))
    objective = replace(objective, whiten_advantages=whiten, opd_kl_discount=discount)
    made, teachers = samples(3), [teacher("one", 0.7), teacher("two", 2.0)]
    coefficients = {"one": 0.7, "two": 2.0}
    found = external_advantages(made, objective)

    def naive_whiten(rows: list[list[float]]) -> tuple[float, float]:
        kept = [v for e, row in zip(made, rows, strict=True) for v, m in zip(row, e.action_mask, strict=True) if m]
        mean = sum(kept) / len(kept)
        return mean, math.sqrt(sum((value - mean) ** 2 for value in kept) / (len(kept) - 1) + 1e-8)

    rewards = naive_norm([e.reward for e in made], GROUPS, objective.norm_mean_type, objective.norm_std_type)
    rows = []
    for e, reward in zip(made, rewards, strict=True):
        row = [0.0] * len(e.action_mask)
        last = max((t for t, m in enumerate(e.action_mask) if m), default=None)
        if last is not None:
            limit = objective.reward_clip or math.inf
            row[last] = min(max(reward, -limit), limit)
        for t, m in enumerate(e.action_mask):
            gap = float(e.ref_logprobs[t]) - float(e.old_logprobs[t])
            row[t] -= objective.init_kl_coef * m * (math.exp(gap) - 1 - gap)
        rows.append(row)
    mean, scale = naive_whiten(rows) if objective.whiten_rewards else (0.0, 1.0)
    rows = [
        [m * (value - mean) / scale for value, m in zip(row, e.action_mask, strict=True)]
        for e, row in zip(made, rows, strict=True)
    ]

    def apart(e: Sample, t: int, k: int) -> int:
        return int(e.action_mask[t + 1 : k + 1].sum())  # a discount is of one action token

    returns = [
        [sum(objective.gamma ** apart(e, t, k) * row[k] for k in range(t, len(row))) for t in range(len(row))]
        for e, row in zip(made, rows, strict=True)
    ]
    mean, scale = naive_whiten(returns) if whiten else (0.0, 1.0)
    limit = objective.advantage_clip or math.inf
    valued = with_total_advantages(found, teachers, replace(objective, opd_kl_discount=discount))
    weights = [e.total_advantages for e in valued]
    every = [token_level_rewards(e, objective) for e in valued]
    for e, row, weight, reward in zip(found, returns, weights, every, strict=True):
        penalty = [
            sum(
                coefficients[name] * m * (float(e.old_logprobs[t]) - float(q[t]))
                for name, q in e.teacher_logprobs.items()
            )
            for t, m in enumerate(e.action_mask)
        ]
        to_go = [sum(discount ** apart(e, t, k) * penalty[k] for k in range(t, len(row))) for t in range(len(row))]
        wanted = [
            m * min(max((row[t] - mean) / scale - later, -limit), limit)
            for t, (m, later) in enumerate(zip(e.action_mask, to_go, strict=True))
        ]
        assert weight == pytest.approx(wanted, abs=1e-5)  # of the update, f32
        token_rewards = [-value for value in penalty]
        for t, m in enumerate(e.action_mask):
            gap = float(e.ref_logprobs[t]) - float(e.old_logprobs[t])
            token_rewards[t] -= objective.init_kl_coef * m * (math.exp(gap) - 1 - gap)
        if any(e.action_mask):
            token_rewards[max(t for t, m in enumerate(e.action_mask) if m)] += e.reward
        assert reward == pytest.approx(token_rewards, abs=1e-5)
        assert (e.metrics["advantage_mean"], e.metrics["advantage_scale"]) == pytest.approx((mean, scale))
    metrics = advantage_metrics(valued, objective)
    sums = [reward.sum() for reward in every]
    assert metrics["critic/rewards/mean"] == pytest.approx(sum(sums) / len(sums))


def test_what_an_advantage_drops_is_as_if_never_sampled() -> None:
    """Groups with equal rewards are not in whitening and weights; with a teacher, only their reward is removed."""
    made = [replace(e, reward=0.5) if e.group_id == "a" else e for e in samples(4)]
    left = [e for e in made if e.group_id != "a"]
    assert 0 < len(left) < len(made)
    arguments = FrozenDict({"std_threshold": 0.0})
    objective = ObjectivePlan(adv_estimator="grpo", advantage_args=arguments, gamma=0.9, whiten_advantages=True)
    wanted = {e.id: e for e in external_advantages(left, objective)}
    found = external_advantages(made, objective)
    for e in found:
        if e.group_id == "a":
            assert not e.loss_mask.any() and not e.advantages.any() and not e.excluded
        elif e.id in wanted:
            assert e.loss_mask is wanted[e.id].loss_mask or e.loss_mask.tolist() == wanted[e.id].loss_mask.tolist()
            assert e.advantages.tolist() == wanted[e.id].advantages.tolist()
    taught = external_advantages(made, replace(objective, whiten_advantages=False), taught=True)
    assert all(e.loss_mask is None for e in taught)
    assert not any(e.advantages.any() for e in taught if e.group_id == "a")
    nothing = external_advantages([e for e in made if e.group_id == "a"], objective)
    assert not any(e.loss_mask.any() for e in nothing)


def test_without_an_external_reward_only_the_teacher_speaks() -> None:
    (sample, *_), teachers = samples(5), [teacher("one", 0.5)]
    expected = np.where(sample.action_mask, 0.5 * (sample.teacher_logprobs["one"] - sample.old_logprobs), 0)
    (valued,) = with_total_advantages([sample], teachers, ObjectivePlan())
    assert valued.total_advantages == pytest.approx(expected, abs=1e-7)
    assert token_level_rewards(valued, ObjectivePlan()) == pytest.approx(expected, abs=1e-7)


def test_a_sample_without_a_reward_is_named() -> None:
    for domain, why in (
        ("", "its row needs a ground_truth.*tag_included"),
        ("d", "rewards.d returned None for this sample"),
    ):
        made = [replace(e, reward=None, domain=domain) if e.id == "c/4" else e for e in samples(1)]
        with pytest.raises(RunError, match=f"sample c/4, tagged t, has no reward: {why}"):
            external_advantages(made, ObjectivePlan(adv_estimator="reinforce"))


def test_token_level_kl_has_the_coefficient_that_it_was_given() -> None:
    objective = ObjectivePlan(adv_estimator="reinforce", gamma=1.0, init_kl_coef=0.3, kl_penalty="mse")
    made = samples(5)
    found = external_advantages(made, objective, 0.05)
    other = external_advantages(made, replace(objective, init_kl_coef=0.05))
    for one, same in zip(found, other, strict=True):
        assert one.advantages.tolist() == same.advantages.tolist()
        assert one.metrics == same.metrics and one.metrics["kl_coef"] == 0.05
    silent = [teacher("one", 0.0), teacher("two", 0.0)]
    for one, same in zip(*(with_total_advantages(each, silent, objective) for each in (found, other)), strict=True):
        assert token_level_rewards(one, objective).tolist() == token_level_rewards(same, objective).tolist()
    means = []
    for e in made:
        gaps = [
            (float(e.old_logprobs[t]) - float(e.ref_logprobs[t])) ** 2 / 2
            for t in range(len(e.action_mask))
            if e.action_mask[t]
        ]
        means += [sum(gaps) / len(gaps)] if gaps else []
    metrics = advantage_metrics(with_total_advantages(found, silent, objective), objective)
    assert metrics["critic/kl_coef"] == 0.05
    assert metrics["critic/reference_kl"] == pytest.approx(sum(means) / len(means), rel=1e-9)
    assert "critic/kl_coef" not in advantage_metrics(
        with_total_advantages(found, silent, objective), replace(objective, init_kl_coef=0.0)
    )


def test_a_clip_does_not_make_finite_what_is_not() -> None:
    """Otherwise the run would train on such a value without an error."""
    values = torch.tensor([math.inf, -math.inf, math.nan, 3.0, -0.2])
    assert clipped(values, 1.0).tolist() == pytest.approx([math.inf, -math.inf, math.nan, 1.0, -0.2], nan_ok=True)
