"""Masks and weights of whole samples against ROLL's own arithmetic on padded tensors (functionals.py, actor_worker.py).

The references are its lines, with the tensors that they read made here: rewards in groups of `n`, lengths by masks.
"""

import numpy as np
import pytest
import torch

from roll_opd.objective.filters import below_longest, between_difficulties, right_or_short, sample_weights


def rolls_masks(scores: torch.Tensor, lengths: torch.Tensor, longest: int, n: int, low: float, high: float, most: int):
    """`get_sample_level_mask`: the three masks, each as if it alone were on."""
    response_mask = torch.arange(longest)[None] < lengths[:, None]
    true_response_length = response_mask.sum(-1).float()
    max_len = longest != true_response_length
    means = scores.reshape(-1, n).mean(dim=-1, keepdim=True).expand(-1, n).reshape(-1)
    difficulty = (means > low) * (means < high)
    error = ((scores == 0) & (true_response_length < most)) | (scores == 1)
    return max_len, difficulty, error


def rolls_weights(lengths: torch.Tensor, difficulty: torch.Tensor | None, by_length: bool) -> torch.Tensor:
    """`compute_sample_weights`."""
    sample_weights = torch.ones(len(lengths))
    if difficulty is not None:
        sample_weights = sample_weights * (0.5 + 1.5 * torch.clamp(difficulty, 0.0, 1.0))
    if by_length:
        norm_lengths = (lengths - lengths.min()) / (lengths.max() - lengths.min() + 1e-8)
        sample_weights = sample_weights * (1.5 - norm_lengths)
    return sample_weights * (len(lengths) / (sample_weights.sum() + 1e-8))


@pytest.mark.parametrize("seed", range(5))
def test_masks_are_rolls(seed: int) -> None:
    rng, n, longest, most = np.random.default_rng(seed), 4, 8, 5
    lengths = rng.integers(1, longest + 1, size=24)
    rewards = rng.choice([0.0, 0.5, 1.0], size=24, p=[0.6, 0.1, 0.3])
    groups = [str(number // n) for number in range(24)]
    low, high = 0.0, 0.75
    wanted = rolls_masks(torch.tensor(rewards), torch.tensor(lengths), longest, n, low, high, most)
    found = (
        below_longest(lengths, longest),
        between_difficulties(rewards.tolist(), groups, low=low, high=high),
        right_or_short(rewards.tolist(), lengths, threshold=most),
    )
    assert [list(one) for one in found] == [one.tolist() for one in wanted]


def test_thresholds_are_outside_and_a_failed_reward_counts_in_no_mean() -> None:
    groups = ["a"] * 2 + ["b"] * 2 + ["c"] * 2 + ["d"]
    rewards = [0.0, 0.0, 1.0, 1.0, 1.0, None, None]
    assert between_difficulties(rewards, groups, low=0.0, high=1.0) == [False] * 6 + [True]
    assert between_difficulties(rewards, groups, low=-0.1, high=1.1) == [True] * 7
    assert right_or_short([None, 1.0, 0.5, 0.0], [9, 9, 1, 9], threshold=5) == [True, True, False, False]


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("difficulties", [None, [0.0, 0.3, 1.0, 7.0, -1.0]])
def test_weights_are_rolls(difficulties: list[float] | None, by_length: bool) -> None:
    lengths = [3, 9, 5, 5, 4]
    known = None if difficulties is None else torch.tensor(difficulties)
    found = sample_weights(lengths, difficulties, by_length=by_length)
    assert found == pytest.approx(rolls_weights(torch.tensor(lengths).float(), known, by_length).tolist(), abs=1e-6)
    assert sum(found) == pytest.approx(len(lengths))


def test_weights_without_anything_to_go_by() -> None:
    assert sample_weights([], [], by_length=True) == []
    assert sample_weights([4, 4], [None, None], by_length=True) == [1.0, 1.0]
