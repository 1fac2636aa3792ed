"""Generalised advantage estimation and the value loss against loops written from the formulas."""

import numpy as np
import pytest
import torch

from roll_opd.objective.returns_and_gae import discounted_to_go, gae, value_loss

LENGTHS = (7, 1, 0, 5, 1, 12)


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rewards, values and a mask: gaps, a sequence without any action, arbitrary values outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(LENGTHS)
    mask = torch.rand(size, generator=generator) < 0.7
    mask[8:13] = False  # the sequence of five
    rewards, values = torch.randn(2, size, generator=generator, dtype=torch.float64)
    garbage = torch.where(torch.arange(size) % 2 == 0, torch.nan, 1e30)
    return torch.where(mask, rewards, garbage), torch.where(mask, values, garbage), mask


def naive(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lambd: float
) -> tuple[list[float], list[float]]:
    """Return the advantages of one sequence, each from a separate sum."""
    actions = [t for t, chosen in enumerate(mask) if chosen]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for k, t in enumerate(actions):
        total = 0.0
        for i in range(k, len(actions)):
            following = values[actions[i + 1]] if i + 1 < len(actions) else 0.0
            total += (gamma * lambd) ** (i - k) * (rewards[actions[i]] + gamma * following - values[actions[i]])
        advantages[t], returns[t] = total, total + values[t]
    return advantages, returns


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lambd", [0.0, 0.5, 0.95, 1.0])
def test_equals_the_sums_it_stands_for(gamma: float, lambd: float) -> None:
    rewards, values, mask = inputs(3)
    advantages, returns = gae(rewards, values, mask, LENGTHS, gamma, lambd)
    assert advantages.dtype == returns.dtype == torch.float64
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        wanted = naive(rewards[part].tolist(), values[part].tolist(), mask[part].tolist(), gamma, lambd)
        assert advantages[part].tolist() == pytest.approx(wanted[0], abs=1e-10)
        assert returns[part].tolist() == pytest.approx(wanted[1], abs=1e-10)
        start += length


def test_tokens_of_others_are_no_steps() -> None:
    """Tokens between two actions have no effect, however many they are."""
    rewards, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 2.0])
    dense, _ = gae(rewards, values, torch.ones(3, dtype=torch.bool), [3], 0.9, 0.8)
    places = torch.tensor([0, 4, 9])
    spread = torch.zeros(3, 12)
    spread[:, places] = torch.stack([rewards, values, torch.ones(3)])
    sparse, _ = gae(spread[0], spread[1], spread[2].bool(), [12], 0.9, 0.8)
    assert torch.equal(sparse[places], dense)


def test_lambda_one_is_the_return_whatever_the_critic_says() -> None:
    rewards, values, _ = (torch.randn(10, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(10, dtype=torch.bool)
    _, returns = gae(rewards, values, mask, [4, 6], 0.7, 1.0)
    assert returns == pytest.approx(discounted_to_go(rewards, mask, [4, 6], 0.7), abs=1e-12)


def test_gae_without_action_tokens_is_zero() -> None:
    for lengths in ((), (0, 0), (3,)):
        empty = torch.zeros(sum(lengths))
        advantages, returns = gae(empty, empty, empty.bool(), lengths, 1.0, 0.95)
        assert not advantages.any() and not returns.any() and len(returns) == sum(lengths)


@pytest.mark.parametrize("clip", [None, 0.2, 10.0])
def test_value_loss_equals_the_clipped_squared_error_of_each_token(clip: float | None) -> None:
    rng = np.random.default_rng(0)
    values, old, returns = rng.normal(size=(3, 200))
    wanted = []
    for value, before, target in zip(values, old, returns, strict=True):
        held = value if clip is None else min(max(value, before - clip), before + clip)
        wanted.append(max((value - target) ** 2, (held - target) ** 2) / 2)
    found = value_loss(*map(torch.from_numpy, (values, old, returns)), clip)
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_of_the_value_loss(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, clip), values)
    if clip:  # beyond the clip range, and nearer to the return than the held value: no pull
        (gradient,) = torch.autograd.grad(value_loss(values, old, returns, clip).sum(), values)
        held = (values > old + clip) & (values < returns) & (returns - old > clip)
        assert held.any() and not gradient[held].any()
