"""Runs of several steps: comparisons between the runs of a prompt count each run once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from roll_opd.base.failures import RunError
from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.external_advantages import external_advantages
from roll_opd.samples.sample import Sample, as_columns
from roll_opd.tracking.reward_metrics import reward_metrics
from roll_opd.tracking.sample_metrics import opd_metrics
from roll_opd.tracking.validation_metrics import validation_metrics
from tests.each import each


def step(group: str, run: int | None, number: int, reward: float, tokens: int = 2) -> Sample:
    return Sample(
        id=f"{group}/{run}.{number}",
        group_id=group,
        run=run,
        step=number,
        tag="t",
        domain="math",
        tokens=np.arange(tokens + 1),
        prompt_length=1,
        finish_reason="stop",
        reward=reward,
        columns=as_columns(
            action_mask=np.ones(tokens, bool), rollout_logprobs=np.full(tokens, -0.1 * (number + 1), np.float32)
        ),
    )


def advantages(experiences: list[Sample], name: str, **arguments) -> list[float]:
    objective = ObjectivePlan(adv_estimator=name, advantage_args=arguments, init_kl_coef=0.0)
    return [float(e.advantages[0]) for e in external_advantages(experiences, objective)]


@each("seed", range(20))
@each("name", ["grpo", "rloo", "reinforce", "opmd"])
def test_baselines_count_runs(name: str, seed: int) -> None:
    """The reference compares a step with the mean of the runs' mean rewards and the larger of two deviations."""
    rng = np.random.default_rng(seed)
    experiences, runs = [], []
    for group in "abc":
        for run in range(int(rng.integers(2, 5))):
            rewards = rng.normal(size=rng.integers(1, 4))
            experiences += [step(group, run, number, float(reward)) for number, reward in enumerate(rewards)]
            runs.append(step(group, run, 0, float(rewards.mean())))
    objective = ObjectivePlan(adv_estimator=name, init_kl_coef=0.0)
    of_runs = {(e.group_id, e.run): e.metrics for e in external_advantages(runs, objective)}
    for experience in external_advantages(experiences, objective):
        metrics = of_runs[experience.group_id, experience.run]
        scale = metrics["reward_scale"]
        if name == "grpo":
            steps = [e.reward for e in experiences if e.group_id == experience.group_id]
            mean = sum(steps) / len(steps)
            deviation = (sum((reward - mean) ** 2 for reward in steps) / (len(steps) - 1)) ** 0.5
            scale = max(scale, deviation + 1e-6)
        expected = (experience.reward - metrics["reward_mean"]) / scale
        assert experience.advantages[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_steps_of_equal_runs_are_no_giants() -> None:
    """Each run has the steps 0 and -1: runs without any deviation, steps with one of 0.58 (of four numbers)."""
    experiences = [step("a", run, number, -float(number)) for run in range(2) for number in range(2)]
    assert advantages(experiences, "grpo") == pytest.approx([0.5 / (1 / 3) ** 0.5, -0.5 / (1 / 3) ** 0.5] * 2, rel=1e-5)


@each("seed", range(40))
def test_an_advantage_of_a_step_is_bounded(seed: int) -> None:
    """By sqrt(n) of n steps in runs of one length, as where n samples are compared, and by sqrt(1.5 n) in others.

    A step's distance from the mean of runs is v · r with sum(v) = 0 and |v|² <= 1 + 1 / runs, so that it is at most
    sqrt((1 + 1 / runs) (n - 1)) deviations.
    """
    rng = np.random.default_rng(seed)
    lengths = [3] * 4 if seed % 2 else [int(length) for length in rng.integers(1, 9, int(rng.integers(2, 5)))]
    spread = 10.0 ** rng.integers(-3, 4)
    experiences = []
    for run, length in enumerate(lengths):
        rewards = rng.normal(size=length) ** 3 * spread
        if seed % 4 < 2:
            rewards -= rewards.mean()  # runs that are nearly equal
        experiences += [step("a", run, number, float(reward)) for number, reward in enumerate(rewards)]
    largest = max(map(abs, advantages(experiences, "grpo")))
    assert 0 < largest <= (sum(lengths) * (1 if seed % 2 else 1.5)) ** 0.5


@each("name", ["grpo", "rloo", "reinforce", "opmd"])
def test_runs_of_one_step_are_as_samples(name: str) -> None:
    """Same bits, also if another group has runs of several steps."""
    rng = np.random.default_rng(3)
    single = [step("a", run, 0, float(rng.normal())) for run in range(5)]
    others = [step("b", run, number, float(rng.normal())) for run in range(3) for number in range(2)]
    samples = [step("a", None, 0, e.reward) for e in single]
    assert advantages(single, name) == advantages(samples, name) == advantages([*single, *others], name)[:5]


def test_a_step_more_changes_nothing_for_the_other_runs() -> None:
    few = [step("a", 0, 0, 1.0), step("a", 1, 0, 0.0), step("a", 2, 0, 0.5)]
    many = [few[0], *(step("a", 1, number, 0.0) for number in range(5)), few[2]]
    one, other = advantages(few, "grpo"), advantages(many, "grpo")
    assert [one[0], one[1], one[2]] == pytest.approx([other[0], other[1], other[-1]])


def test_step_wise_grpo_reads_the_last_step_of_each_run() -> None:
    made = [step("a", 0, 0, 9.0), step("a", 0, 1, 1.0), step("a", 1, 0, 0.0)]
    found = advantages(made, "step_wise_grpo")
    scale = float(torch.tensor([1.0, 0.0], dtype=torch.float64).std()) + 1e-6
    assert found == pytest.approx([0.5 / scale, 0.5 / scale, -0.5 / scale])


def test_samples_without_a_run_are_runs_of_their_own() -> None:
    with_runs = advantages([step("a", run, 0, float(run)) for run in range(4)], "grpo")
    assert advantages([step("a", None, 0, float(run)) for run in range(4)], "grpo") == with_runs


@each("seed", range(10))
def test_metrics_of_rewards_count_runs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experiences, means = [], []
    for group in "abc":
        for run in range(4):
            rewards = rng.integers(0, 2, rng.integers(1, 4)).astype(float)
            experiences += [step(group, run, number, float(reward)) for number, reward in enumerate(rewards)]
            means.append(rewards.mean())
    rng.shuffle(experiences)
    found = opd_metrics(experiences) | reward_metrics(experiences) | validation_metrics(experiences, 4)
    for name in ("critic/score/mean", "reward/math/mean", "val/reward/all/mean"):
        assert found[name] == pytest.approx(np.mean(means))
    assert found["val_correct/all/mean"] == pytest.approx(np.mean([mean >= 1 for mean in means]))
    assert found["reward/math/max"] == max(means)
    right = [sum(mean >= 1 for mean in means[start : start + 4]) for start in (0, 4, 8)]
    assert found["val_correct/all/avg@4"] == pytest.approx(np.mean(right) / 4)


def test_a_reward_that_is_missing_is_asked_of_the_workflow() -> None:
    unscored = replace(step("a", 0, 0, 1.0), reward=None, domain="")
    objective = ObjectivePlan(adv_estimator="grpo", init_kl_coef=0.0)
    with pytest.raises(RunError, match="has no reward: workflow mine should return experiences with a reward, or its"):
        external_advantages([unscored], objective, workflow="mine")
    with pytest.raises(RunError, match="has no reward: its row needs a ground_truth"):
        external_advantages([unscored], objective)
