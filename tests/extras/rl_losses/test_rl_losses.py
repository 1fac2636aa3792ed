"""Losses and advantages of the room by hand; tests/objective compares all of them with naive references."""

import math

import pytest
import torch

from roll_opd.extras.rl_losses.mixed_losses import chord_mu
from roll_opd.objective.advantages.reward_normalisation import RewardBatch
from roll_opd.objective.losses.batch import LossBatch, beyond_bounds
from roll_opd.objective.registry import ADVANTAGES, POLICY_LOSSES


def test_bounds_of_gspo_are_its_own() -> None:
    ones = torch.ones(3)
    made = LossBatch(torch.tensor([1.05, 1.2, 0.7]).log(), ones.log(), ones, ones.bool(), (1, 1, 1))
    assert beyond_bounds("gspo", made, POLICY_LOSSES.defaults("gspo")).all()  # 3e-4 and 4e-4, whatever pg_clip is


def test_chord_schedule() -> None:
    found = [chord_mu(step, 2, 4, 0.8, 0.2) for step in range(8)]
    assert found == pytest.approx(
        [0.0, 0.4, 0.8, 0.5 + 0.3 * math.sqrt(0.5), 0.5, 0.5 - 0.3 * math.sqrt(0.5), 0.2, 0.2]
    )


def test_what_an_advantage_cannot_compute_is_refused() -> None:
    alone = RewardBatch(torch.zeros(2), ["a", "a"])
    with pytest.raises(ValueError, match="opmd_baseline 'median' is unknown; use mean or logavgexp"):
        ADVANTAGES.find("opmd")(alone, opmd_baseline="median")
    with pytest.raises(ValueError, match="drop 'all' of advantage rec is unknown"):
        ADVANTAGES.find("rec")(alone, drop="all")
    with pytest.raises(ValueError, match="the states of the samples are unknown"):
        ADVANTAGES.find("gigpo")(alone)
