"""Every function of `roll_opd.objective` against a loop in double precision, and properties for any input."""

import math

import pytest
import torch

from roll_opd.objective.aggregation import MODES, token_weights
from roll_opd.objective.returns_and_gae import discounted_to_go
from roll_opd.objective.reverse_kl import weighted_reverse_kl


def random(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def masks(seed: int) -> list[torch.Tensor]:
    """Return masks of several lengths; one without an action, one without a token."""
    lengths = [7, 1, 12, 0, 5, 9]
    drawn = [random(seed + index, length) > -0.5 for index, length in enumerate(lengths)]
    drawn[4][:] = False
    drawn[0][:2] = torch.tensor([True, False])
    return drawn


def naive_mean(values: list[torch.Tensor], masks: list[torch.Tensor], mode: str, normaliser: float) -> float:
    kept = [
        [float(value) for value, taken in zip(row, mask, strict=True) if taken]
        for row, mask in zip(values, masks, strict=True)
    ]
    full = [row for row in kept if row]
    if mode == "token-mean":
        return sum(map(sum, full)) / sum(map(len, full))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, full)) / len(full)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in full) / len(full)
    return sum(map(sum, full)) / normaliser


@pytest.mark.parametrize("mode", MODES)
def test_weighted_sum_is_the_mean_that_the_mode_names(mode: str) -> None:
    for seed in range(5):
        rows = masks(seed)
        values = [random(50 + seed + index, len(mask)) for index, mask in enumerate(rows)]
        weights = token_weights(rows, mode, normaliser=37.0)
        total = sum(float((value.double() * weight).sum()) for value, weight in zip(values, weights, strict=True))
        assert total == pytest.approx(naive_mean(values, rows, mode, 37.0), rel=1e-5, abs=1e-7)
        for mask, weight in zip(rows, weights, strict=True):
            assert weight.dtype == torch.float32 and weight.shape == mask.shape
            assert not weight[~mask].any()


@pytest.mark.parametrize("mode", MODES)
def test_no_split_changes_the_total(mode: str) -> None:
    """Weights are fixed before the split, so parts in any order and of any size have the same sum as the batch."""
    rows = masks(3)
    values = [random(90 + index, len(mask)) for index, mask in enumerate(rows)]
    weights = token_weights(rows, mode, normaliser=11.0)
    losses = [(value * weight).double().sum() for value, weight in zip(values, weights, strict=True)]
    for seed in range(20):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
        cut = seed % len(rows)
        parts = [sum(losses[number] for number in part) for part in (order[:cut], order[cut:])]
        assert float(sum(parts)) == pytest.approx(float(sum(losses)), rel=1e-12)
        permuted = token_weights([rows[number] for number in order], mode, normaliser=11.0)
        for number, weight in zip(order, permuted, strict=True):
            assert torch.equal(weight, weights[number])


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_learn_from(mode: str) -> None:
    empty = [torch.zeros(3, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)]
    assert not any(weight.any() for weight in token_weights(empty, mode, normaliser=2.0))
    assert token_weights([], mode, normaliser=2.0) == []


def test_unusable_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mean' is unknown; use one of token-mean, "):
        token_weights(masks(0), "mean")
    for normaliser in (None, 0.0):
        with pytest.raises(ValueError, match="needs a normaliser"):
            token_weights(masks(0), "seq-mean-token-sum-norm", normaliser)


def test_each_part_has_a_mean_of_its_own() -> None:
    rows = masks(4)
    parts = [True, False, False, True, True, False]
    for mode in MODES:
        found = token_weights(rows, mode, 7.0, parts)
        for part in (True, False):
            members = [number for number, own in enumerate(parts) if own == part]
            alone = token_weights([rows[number] for number in members], mode, 7.0)
            assert all(torch.equal(found[n], weight) for n, weight in zip(members, alone, strict=True))


def test_penalty_of_several_teachers() -> None:
    student, teachers = random(9, 40), [random(10, 40), random(11, 40), random(12, 40)]
    coefficients = [0.3, 0.0, 1.7]
    found = weighted_reverse_kl(
        student,
        torch.full((40,), sum(coefficients)),
        sum(c * teacher for c, teacher in zip(coefficients, teachers, strict=True)),
    )
    for t in range(40):
        pairs = zip(coefficients, teachers, strict=True)
        wanted = sum(c * (float(student[t]) - float(teacher[t])) for c, teacher in pairs)
        assert float(found[t]) == pytest.approx(wanted, abs=1e-5)
    wild = torch.tensor([math.nan, math.inf, -math.inf, 1.0] * 10)
    assert not weighted_reverse_kl(wild, torch.zeros(40), torch.zeros(40)).any()  # off the mask anything


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lengths", [[5, 0, 1, 9], [15], [1] * 15, [0, 15, 0]])
def test_discounted_to_go(lengths: list[int], discount: float) -> None:
    """Sums are over the action tokens of each sequence only, not over boundaries or masked tokens."""
    mask = random(14, sum(lengths)) > -0.3
    values = torch.where(mask, random(13, sum(lengths)), math.nan)
    found = discounted_to_go(values, mask, lengths, discount)
    wanted, start = [], 0
    for length in lengths:
        row = [float(v) if m else None for v, m in zip(values[start : start + length], mask[start:], strict=False)]
        for t in range(length):
            ahead = [value for value in row[t:] if value is not None]
            own = sum(discount**k * value for k, value in enumerate(ahead))
            wanted.append(0.0 if row[t] is None else own)
        start += length
    torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_sums_to_go_without_action_tokens_are_zero(discount: float) -> None:
    for lengths in ([], [0, 0], [2, 1]):
        nothing = torch.zeros(sum(lengths))
        assert not discounted_to_go(nothing + 1, nothing.bool(), lengths, discount).any()
