"""Rewards of several domains, and masked samples: their advantages and weights."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import ObjectivePlan, SamplingPlan
from roll_opd.objective.columns import loss_columns, value_columns
from roll_opd.objective.external_advantages import external_advantages
from roll_opd.objective.filters import mask_metrics, masked
from roll_opd.objective.reference_kl import adaptive_kl_coefficient, kl_coefs
from roll_opd.samples.sample import Sample, as_columns

BATCH = ObjectivePlan(
    adv_estimator="reinforce",
    gamma=1.0,
    norm_mean_type="batch",
    norm_std_type="batch",
    advantage_args=FrozenDict({"mean_cal_level": "batch", "std_cal_level": "batch"}),
)


def sample(number: int, domain: str, reward: float, length: int = 3, group: str = "", **fields: object) -> Sample:
    rng = np.random.default_rng(number)

    def logprobs() -> np.ndarray:
        return -rng.exponential(size=length).astype(np.float32)

    made = Sample(
        id=str(number),
        group_id=group or str(number),
        tag="t",
        domain=domain,
        tokens=np.arange(2 + length),
        prompt_length=2,
        finish_reason="stop",
        reward=reward,
        columns=as_columns(
            action_mask=np.ones(length, dtype=bool),
            rollout_logprobs=logprobs(),
            old_logprobs=logprobs(),
            ref_logprobs=logprobs(),
        ),
    )
    return replace(made, **fields)


def two_domains() -> list[Sample]:
    """Drawn in turn, as a step draws them."""
    pairs = zip([0, 1, 1, 1], [3, 5, 4, 8], strict=True)
    both = [one for math, code in pairs for one in (("math", math), ("code", code))]
    return [sample(n, domain, reward, length=2 + n % 3) for n, (domain, reward) in enumerate(both)]


def of(domain: str, experiences: Sequence[Sample]) -> list[Sample]:
    return [one for one in experiences if one.domain == domain]


def test_each_domain_is_normalised_by_itself() -> None:
    """As with ROLL's group_by("domain"): in one batch, right answers in mathematics would get a negative advantage."""
    found = external_advantages(two_domains(), BATCH)
    last = [float(one.advantages[0]) for one in found]
    assert last[::2] == pytest.approx([-1.5, 0.5, 0.5, 0.5], abs=1e-5)
    assert last[1::2] == pytest.approx([-0.9258, 0.0, -0.4629, 1.3887], abs=1e-4)


@pytest.mark.parametrize("whiten", ["whiten_rewards", "whiten_advantages"])
def test_a_domain_beside_another_is_as_it_is_alone(whiten: str) -> None:
    made, objective = two_domains(), replace(BATCH, init_kl_coef=0.3, reward_clip=0.8, **{whiten: True})
    together = external_advantages(made, objective)
    for domain in ("math", "code"):
        alone = external_advantages(of(domain, made), objective)
        for one, other in zip(of(domain, together), alone, strict=True):
            assert np.array_equal(one.advantages, other.advantages)
            assert one.metrics == other.metrics


def test_the_coefficient_moves_after_each_domain() -> None:
    made = two_domains()
    objective = replace(BATCH, init_kl_coef=0.2, target_kl=0.1, kl_horizon=100)
    wanted = [0.2]
    for domain in ("math", "code"):
        samples = of(domain, made)
        kl = np.mean([np.mean(one.old_logprobs - one.ref_logprobs) for one in samples])
        wanted.append(adaptive_kl_coefficient(wanted[-1], float(kl), target=0.1, horizon=100, samples=len(samples)))
    assert kl_coefs(made, objective) == pytest.approx(wanted, rel=1e-5)
    found = external_advantages(made, objective)
    assert [one.metrics["kl_coef"] for one in found] == pytest.approx(wanted[:2] * 4, rel=1e-5)
    assert kl_coefs(made, replace(objective, target_kl=None), 0.7) == [0.7, 0.7, 0.7]


def test_what_is_masked_counts_in_its_groups_mean_and_in_no_whitening() -> None:
    """As in ROLL, where rewards are normalised with all samples, and whitened under final_response_mask."""
    objective = ObjectivePlan(
        adv_estimator="grpo",
        gamma=1.0,
        advantage_args=FrozenDict({"mean_cal_level": "group", "std_cal_level": None}),
        whiten_advantages=True,
        max_len_mask=True,
        difficulty_mask=True,
        difficulty_low_threshold=0.1,
        difficulty_high_threshold=0.9,
    )
    rows = [("a", 1.0, 3), ("a", 0.0, 5), ("a", 0.0, 2), ("b", 1.0, 2), ("b", 1.0, 2), ("b", 1.0, 2)]
    made = [sample(n, "d", reward, length, group) for n, (group, reward, length) in enumerate(rows)]
    chosen = masked(made, objective, SamplingPlan(n=3, max_new_tokens=5))
    assert [one.is_learned_from for one in chosen] == [True, False, True, False, False, False]
    assert mask_metrics(chosen) == pytest.approx(
        {"rollout/masked/max_len": 1 / 6, "rollout/masked/difficulty": 3 / 6, "rollout/masked/any": 4 / 6}
    )
    found = external_advantages(chosen, objective)
    raw = np.array([2 / 3] * 3 + [-1 / 3] * 2)  # group a's mean is 1/3; tokens of the first and the third sample
    wanted = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    assert np.concatenate([found[0].advantages, found[2].advantages]) == pytest.approx(wanted, abs=1e-9)
    assert not any(one.advantages.any() for one in found if not one.is_learned_from)
    for one, train in zip(found, loss_columns(found, (), objective), strict=True):
        assert train.columns["mask"].any() == one.is_learned_from
    valued = [
        one.with_columns(values=np.zeros(one.response_length, np.float32), returns=one.advantages) for one in found
    ]
    assert [one.columns["mask"].any() for one in value_columns(valued)] == [one.is_learned_from for one in found]


def test_without_masks_nothing_is_touched() -> None:
    made = two_domains()
    assert masked(made, ObjectivePlan(), SamplingPlan(n=4, max_new_tokens=2)) == made
    alone = masked(made, ObjectivePlan(difficulty_mask=True), SamplingPlan(n=1, max_new_tokens=9))
    assert all(one.is_learned_from for one in alone) and not mask_metrics(alone)


def test_weights_of_samples_multiply_those_of_a_correction() -> None:
    rows = FrozenDict({"difficulty": 1.0, "test_cases": "long"}), FrozenDict({"difficulty": 0}), FrozenDict()
    made = [sample(n, "d", 1.0, extra=extra) for n, extra in enumerate(rows)]
    made[0] = made[0].with_columns(importance_weights=np.float32([1.0, 0.5, 2.0]))
    made.append(sample(9, "", 0.0, length=9, demonstration=True))
    objective = ObjectivePlan(difficulty_loss_weight=True, length_loss_weight=True)
    weights = [one.columns["importance_weights"] for one in loss_columns(made, (), objective)]
    mean = (2.0 + 0.5 + 1.0) / 3  # all are equally long; a row without a difficulty counts as 1
    assert weights[0] == pytest.approx(np.array([2.0, 1.0, 4.0]) / mean)
    assert weights[1] == pytest.approx(np.full(3, 0.5 / mean))
    assert weights[2] == pytest.approx(np.full(3, 1.0 / mean))
    assert weights[3].tolist() == [1.0] * 9  # a demonstration is not weighted
    plain = loss_columns(made[:1], (), ObjectivePlan())
    assert plain[0].columns["importance_weights"] is made[0].importance_weights
