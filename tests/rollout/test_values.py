"""Advantages from a critic's values, together with all other parts of a token's advantage, against the formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest

from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, ObjectivePlan, TeacherPlan
from roll_opd.objective.columns import value_columns, with_total_advantages
from roll_opd.objective.external_advantages import external_advantages
from roll_opd.samples.sample import Sample, as_columns, teacher_columns
from roll_opd.workers.critic import value_metrics

COEFFICIENT = 0.7
TEACHER = TeacherPlan(
    "t", MegatronPlan("t", ModelPlan("model"), (0,), Layout(), MicroBatchLimits()), opd_kl_coef=COEFFICIENT
)


def samples() -> list[Sample]:
    """With tokens of others between the actions, and one sample without any action."""
    rng = np.random.default_rng(5)
    made = []
    for number in range(6):
        length = int(rng.integers(2, 12))
        mask = rng.random(length) < 0.6
        mask[:] = False if number == 2 else mask

        def logprobs(length: int = length) -> np.ndarray:
            return -rng.exponential(size=length).astype(np.float32)

        made.append(
            Sample(
                id=str(number),
                group_id=str(number),
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
                    values=rng.normal(size=length).astype(np.float32),
                    **teacher_columns({"t": logprobs()}),
                ),
            )
        )
    return made


@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_and_returns(whiten: bool) -> None:
    objective = ObjectivePlan(
        adv_estimator="gae",
        gamma=0.9,
        lambd=0.8,
        init_kl_coef=0.3,
        reward_clip=0.5,
        advantage_clip=1.5,
        whiten_advantages=whiten,
    )
    made = samples()
    found = external_advantages(made, objective)
    raw = []
    for e in made:
        actions = np.flatnonzero(e.action_mask)
        later, rows = 0.0, {}
        for position, t in reversed(list(enumerate(actions))):
            last = position == len(actions) - 1
            reward = -0.3 * (float(e.old_logprobs[t]) - float(e.ref_logprobs[t]))
            reward += min(max(e.reward, -0.5), 0.5) if last else 0.0
            reward = min(max(reward, -0.5), 0.5)  # once more
            following = 0.0 if last else float(e.values[actions[position + 1]])
            later = reward + 0.9 * following - float(e.values[t]) + 0.9 * 0.8 * later
            rows[t] = later
        raw.append(rows)
    every = [value for rows in raw for value in rows.values()]
    mean = sum(every) / len(every) if whiten else 0.0
    scale = math.sqrt(sum((v - mean) ** 2 for v in every) / (len(every) - 1) + 1e-8) if whiten else 1.0
    for e, rows in zip(found, raw, strict=True):
        wanted, returns = np.zeros(len(e.action_mask)), np.zeros(len(e.action_mask))
        for t, value in rows.items():
            gap = float(e.old_logprobs[t]) - float(e.teacher_logprobs["t"][t])
            wanted[t] = min(max((value - mean) / scale - COEFFICIENT * gap, -1.5), 1.5)
            returns[t] = value + float(e.values[t])
        (valued,) = with_total_advantages([e], [TEACHER], replace(objective, opd_kl_discount=0.0))
        assert valued.total_advantages == pytest.approx(wanted, abs=1e-5)  # of the update, f32
        assert e.returns == pytest.approx(returns, abs=1e-9)
    for sample, e in zip(value_columns(found), found, strict=True):
        assert sample.columns["returns"].dtype == sample.columns["old_values"].dtype == np.float32
        assert sample.columns["returns"] == pytest.approx(e.returns, abs=1e-6)


def test_value_metrics_equal_their_formulas() -> None:
    found = external_advantages(samples(), ObjectivePlan(adv_estimator="gae", gamma=1.0))
    values = [float(v) for e in found for v, m in zip(e.values, e.action_mask, strict=True) if m]
    returns = [float(r) for e in found for r, m in zip(e.returns, e.action_mask, strict=True) if m]

    def variance(numbers: list[float]) -> float:
        centre = sum(numbers) / len(numbers)
        return sum((x - centre) ** 2 for x in numbers) / len(numbers)

    metrics = value_metrics(found)
    left = variance([r - v for r, v in zip(returns, values, strict=True)])
    assert metrics["critic/explained_variance"] == pytest.approx(1 - left / variance(returns))
    assert metrics["critic/values/max"] == max(values) and metrics["critic/returns/min"] == min(returns)
    failed = replace(found[0], excluded=True).with_columns(returns=found[0].returns + 100.0)
    assert value_metrics([*found, failed]) == metrics
    assert value_metrics([found[2]]) == value_metrics([]) == {}  # no action, no number
