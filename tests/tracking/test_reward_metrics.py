"""Metrics of rewards against loops."""

import statistics
from dataclasses import replace

import numpy as np
import pytest
from tracking_assets import experience

from roll_opd.tracking.reward_metrics import reward_metrics, scoring_metrics


def test_reward_metrics_are_those_of_each_domain() -> None:
    rewards = [1.0, 0.0, 0.5, 1.0, 0.25, 0.25, 0.25, None]
    batch = [replace(experience(n), reward=reward) for n, reward in enumerate(rewards)]
    batch[7] = replace(batch[7], excluded=True, reward_reason="timeout")
    batch[0] = replace(batch[0], reward_parts={"format": 1.0, "length": -0.5}, reward_reason="wrong answer!")
    batch[1] = replace(batch[1], reward_parts={"format": 0.0})
    other = replace(experience(2), domain="other", reward=7.0)
    found = reward_metrics([*batch, other, replace(experience(3), domain="", reward=None)])
    given = [reward for reward in rewards if reward is not None]
    assert found["reward/d/mean"] == pytest.approx(statistics.mean(given))
    assert found["reward/d/std"] == pytest.approx(statistics.pstdev(given))
    assert found["reward/d/zero_variance_rate"] == 0.5  # of two groups of four
    assert found["reward/d/format/mean"] == 0.5 and found["reward/d/length/mean"] == -0.5
    assert found["reward/d/reason/wrong_answer"] == 1 and found["reward/d/reason/timeout"] == 1
    assert found["reward/d/excluded"] == 1
    assert found["reward/other/mean"] == 7 and "reward/other/zero_variance_rate" not in found
    assert reward_metrics([]) == {}


def test_latency_queue_and_errors() -> None:
    latencies = np.random.default_rng(0).random(101)
    found = scoring_metrics("d", {"timeout": 2, "a b": 1, "a/b": 1}, latencies, [0, 4], 5)
    assert found["reward/d/errors"] == 4 and found["reward/d/errors/a_b"] == 2
    assert found["time/reward/d/restarts"] == 5 and found["reward/d/timeouts"] == found["reward/d/errors/timeout"] == 2
    assert found["time/reward/d/latency/p50"] == sorted(latencies)[50]
    assert found["time/reward/d/latency/p95"] == pytest.approx(sorted(latencies)[95])
    assert found["time/reward/d/queue/mean"] == 2 and found["time/reward/d/queue/max"] == 4
