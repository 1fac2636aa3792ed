"""Weights, masks and metrics of the gap between training and inference, against loops written from the formulas."""

import math
import statistics

import pytest
import torch

from roll_opd.objective import corrections
from roll_opd.objective.corrections import (
    Mismatch,
    difference_within,
    effective_share,
    icepop_weights,
    importance_weights,
    mismatch_metrics,
    negatives_near,
    ratio_within,
)

LENGTHS = (6, 0, 9, 1, 4)
LEVELS = ("token", "segment", "geometric", "sequence")


def mismatch(seed: int, spread: float = 0.4) -> Mismatch:
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    mask = torch.rand(count, generator=generator) > 0.35
    mask[-4:] = False  # the last sequence has no action
    infer = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    train = -(infer + spread * torch.randn(count, generator=generator, dtype=torch.float64)).abs()
    wild = torch.tensor(math.nan, dtype=torch.float64)
    return Mismatch(torch.where(mask, train, -math.inf), torch.where(mask, infer, wild), mask, LENGTHS)


def naive(made: Mismatch, level: str) -> list[tuple[float, float] | None]:
    """(ratio, difference) of each action token, None elsewhere."""
    found: list[tuple[float, float] | None] = []
    start = 0
    for length in made.lengths:
        tokens = range(start, start + length)
        actions = [t for t in tokens if made.mask_M[t]]
        for t in tokens:
            if not made.mask_M[t]:
                found.append(None)
                continue
            if level == "token":
                members = [t]
            elif level == "segment":
                members = [t]
                while members[0] - 1 in actions:
                    members.insert(0, members[0] - 1)
                while members[-1] + 1 in actions:
                    members.append(members[-1] + 1)
            else:
                members = actions
            log_ratio = sum(float(made.train_M[n]) - float(made.infer_M[n]) for n in members)
            difference = sum(math.exp(made.train_M[n]) - math.exp(made.infer_M[n]) for n in members)
            count = 1 if level == "sequence" else len(members)
            found.append((math.exp(min(max(log_ratio / count, -20), 20)), difference / count))
        start += length
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spread", [0.4, 50.0])
def test_ratios_and_log_differences_equal_the_loop_at_every_level(level: str, spread: float) -> None:
    for seed in range(3):
        made = mismatch(seed, spread)
        wanted = naive(made, level)
        ratios = [1.0 if pair is None else pair[0] for pair in wanted]
        assert made.ratio(level).tolist() == pytest.approx(ratios, rel=1e-9)
        assert made.difference(level).tolist() == pytest.approx([0.0 if p is None else p[1] for p in wanted], abs=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_masks(level: str) -> None:
    made = mismatch(4, 1.5)
    wanted = naive(made, level)

    def each(of, elsewhere):
        return [elsewhere if pair is None else of(*pair) for pair in wanted]

    truncated = importance_weights(made, level=level, upper_bound=1.3)
    assert truncated.tolist() == pytest.approx(each(lambda r, d: min(r, 1.3), 1.0))
    assert importance_weights(made, level=level, upper_bound=None).tolist() == pytest.approx(each(lambda r, d: r, 1.0))
    popped = icepop_weights(made, level=level)
    assert popped.tolist() == pytest.approx(each(lambda r, d: r if 0.2 <= r <= 5 else 0.0, 1.0))
    for low, high in ((0.7, 1.4), (None, 1.4), (0.7, None), (None, None)):
        kept = ratio_within(made, level=level, low=low, high=high)
        bounds = (-math.inf if low is None else low, math.inf if high is None else high)
        assert kept.tolist() == each(lambda r, d, b=bounds: b[0] <= r <= b[1], True)
    kept = difference_within(made, level=level, low=-0.1, high=0.2)
    assert kept.tolist() == each(lambda r, d: -0.1 <= d <= 0.2, True)
    kept = difference_within(made, level=level, low=None, high=0.2)
    assert kept.tolist() == each(lambda r, d: d <= 0.2, True)


def test_far_negatives_are_left_out() -> None:
    made = mismatch(6, 1.0)
    advantages = torch.randn(len(made.mask_M), generator=torch.Generator().manual_seed(1))
    found = negatives_near(made, advantages, delta=0.1)
    for t, pair in enumerate(naive(made, "geometric")):
        far = pair is not None and -math.log(pair[0]) > 0.1
        assert bool(found[t]) == (not (far and advantages[t] < 0))
    assert not found.all()


@pytest.mark.parametrize("piece", [3, 1000])
def test_mismatch_metrics_equal_the_loop_in_pieces_of_any_size(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrections, "PIECE", piece)
    made = mismatch(7)
    gaps = [(float(made.train_M[t]), float(made.infer_M[t])) for t in torch.nonzero(made.mask_M).flatten()]
    ratios = [math.exp(a - b) for a, b in gaps]
    products, begin = [], 0
    for length in made.lengths:
        acted = [t for t in range(begin, begin + length) if made.mask_M[t]]
        if acted:
            products.append(math.prod(math.exp(float(made.train_M[t] - made.infer_M[t])) for t in acted))
        begin += length
    assert mismatch_metrics(made) == pytest.approx(
        {
            "logprob_diff_mean": statistics.mean(abs(a - b) for a, b in gaps),
            "logprob_diff_max": max(abs(a - b) for a, b in gaps),
            "prob_diff_mean": statistics.mean(abs(math.exp(a) - math.exp(b)) for a, b in gaps),
            "prob_diff_max": max(abs(math.exp(a) - math.exp(b)) for a, b in gaps),
            "k1": statistics.mean(b - a for a, b in gaps),
            "k3": statistics.mean(r - 1 - math.log(r) for r in ratios),
            "ratio_mean": statistics.mean(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "ratio_p99": sorted(ratios)[math.ceil(0.99 * len(ratios)) - 1],
            "ess": sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios)),
            "ess_sequence": sum(products) ** 2 / (len(products) * sum(r * r for r in products)),
        }
    )


def test_engines_that_agree_change_nothing() -> None:
    made = mismatch(8, 0.0)
    for level in LEVELS:
        assert torch.equal(importance_weights(made, level=level), torch.ones_like(made.train_M))
        assert ratio_within(made, level=level).all() and difference_within(made, level=level).all()
    metrics = mismatch_metrics(made)
    assert (metrics["k1"], metrics["k3"], metrics["ess"], metrics["ratio_mean"]) == (0.0, 0.0, 1.0, 1.0)
    assert metrics["ess_sequence"] == pytest.approx(1.0) and metrics["ratio_p99"] == 1.0


@pytest.mark.parametrize(
    ("weights", "share"), [([2.0] * 5, 1.0), ([0, 3, 0, 0], 0.25), ([1, 3], 0.8), ([0, 0], 0.0), ([1e-9, 3e-9], 0.8)]
)
def test_the_effective_share_of_weights(weights: list[float], share: float) -> None:
    assert effective_share(torch.tensor(weights, dtype=torch.float64)) == pytest.approx(share)


def test_products_of_long_sequences_do_not_overflow() -> None:
    """Each of two sequences has a product of e^1500; the third has e^-1500."""
    gaps = torch.tensor([3.0] * 1000 + [-3.0] * 500, dtype=torch.float64)
    made = Mismatch(gaps, torch.zeros(1500), torch.ones(1500, dtype=torch.bool), (500, 500, 500))
    assert mismatch_metrics(made)["ess_sequence"] == pytest.approx(2 / 3)


def test_nothing_to_compare() -> None:
    none = Mismatch(torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.bool), (3,))
    assert mismatch_metrics(none) == {}
    empty = Mismatch(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool), (0, 0))
    for level in LEVELS:
        assert importance_weights(empty, level=level).shape == (0,)
        assert torch.equal(importance_weights(none, level=level), torch.ones(3))
    with pytest.raises(ValueError, match="level 'word' of a ratio is unknown"):
        none.ratio("word")
