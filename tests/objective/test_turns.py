"""Returns that are discounted per turn, against a loop over turns, and compared with returns discounted per token."""

import numpy as np
import pytest
import torch

from roll_opd.objective.returns_and_gae import discounted_to_go, turns_to_go
from tests.each import each


def naive(values: list[float], counted: list[bool], acted: list[bool], discount: float) -> list[float]:
    """Of one sequence: split it into turns, add up each, and look ahead from every token."""
    turns: list[list[int]] = []
    for place, act in enumerate(acted):
        if act and (place == 0 or not acted[place - 1]):
            turns.append([])
        if act:
            turns[-1].append(place)
    sums = [sum(values[place] for place in turn if counted[place]) for turn in turns]
    found = [0.0] * len(values)
    for number, turn in enumerate(turns):
        worth = sum(discount**k * later for k, later in enumerate(sums[number:]))
        for place in turn:
            found[place] = worth if counted[place] else 0.0
    return found


@each("discount", [0.0, 0.5, 1.0])
@each("seed", range(20))
def test_equals_a_loop_over_turns(seed: int, discount: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = [int(length) for length in rng.integers(0, 15, 5)]
    values = rng.normal(size=sum(lengths))
    acted = rng.random(sum(lengths)) < rng.choice([0.0, 0.4, 0.8, 1.0])
    counted = acted & (rng.random(sum(lengths)) < 0.9)
    found = turns_to_go(*map(torch.from_numpy, (values, counted, acted)), lengths, discount)
    expected, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        expected += naive(values[part].tolist(), counted[part].tolist(), acted[part].tolist(), discount)
        start += length
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_what_is_off_the_mask_is_not_read() -> None:
    values = torch.tensor([1.0, float("nan"), 2.0], dtype=torch.float64)
    mask = torch.tensor([True, False, True])
    assert turns_to_go(values, mask, mask, [3], 0.5).tolist() == [2.0, 0.0, 2.0]
    every = torch.ones(3, dtype=torch.bool)  # one turn, of which one token is left out
    assert turns_to_go(values, mask, every, [3], 0.5).tolist() == [3.0, 0.0, 3.0]


def test_turns_of_one_token_are_tokens() -> None:
    mask = torch.arange(9) % 2 == 0
    values = torch.arange(9, dtype=torch.float64)
    found = turns_to_go(values, mask, mask, [4, 5], 0.9)
    torch.testing.assert_close(found, discounted_to_go(values, mask, [4, 5], 0.9))
