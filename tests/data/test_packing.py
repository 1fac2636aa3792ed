"""Properties of the split of sequences over ranks and micro-batches, for many random batches."""

import random
from collections.abc import Iterator

import pytest

from roll_opd.config.plan import MicroBatchLimits
from roll_opd.data.packing import assign, micro_batches, split_balanced

LIMITS = [
    MicroBatchLimits(),
    MicroBatchLimits(sequences=1),
    MicroBatchLimits(sequences=3),
    MicroBatchLimits(tokens=100),
    MicroBatchLimits(sequences=4, tokens=60),
    MicroBatchLimits(tokens=1),
]


def batches(count: int = 200) -> Iterator[list[int]]:
    """Lengths of random batches, among them empty ones, equal lengths and one giant."""
    rng = random.Random(0)
    yield from ([], [7], [5] * 12, [900, 1, 1, 1])
    for _ in range(count):
        yield [rng.choice([1, 2, rng.randint(1, 50), rng.randint(1, 200)]) for _ in range(rng.randint(1, 40))]


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 50])
def test_split_takes_every_sequence_once_and_balances(parts: int) -> None:
    for lengths in batches():
        split = split_balanced(lengths, parts)
        assert len(split) == parts
        assert sorted(number for part in split for number in part) == list(range(len(lengths)))
        assert all(part == sorted(part) for part in split)
        loads = [sum(lengths[number] for number in part) for part in split]
        # The heaviest part was the lightest when it got its last sequence
        assert max(loads) - min(loads) <= max(lengths, default=0)
        if len(lengths) >= parts:
            assert all(split)
        assert split == split_balanced(list(lengths), parts)


@pytest.mark.parametrize("limits", LIMITS)
def test_micro_batches_respect_their_limits(limits: MicroBatchLimits) -> None:
    for lengths in batches():
        parts = micro_batches(lengths, limits)
        assert sorted(number for part in parts for number in part) == list(range(len(lengths)))
        assert all(parts), "an empty micro-batch would be run for nothing"
        for part in parts:
            assert limits.sequences is None or len(part) <= limits.sequences
            tokens = sum(lengths[number] for number in part)
            assert limits.tokens is None or tokens <= max(limits.tokens, max(lengths))
        assert parts == micro_batches(list(lengths), limits)


def test_a_sequence_over_the_limit_is_alone_where_it_must_be() -> None:
    parts = micro_batches([150, 40, 40, 40], MicroBatchLimits(tokens=100))
    assert [0] in parts
    assert all(sum((150, 40, 40, 40)[number] for number in part) <= 150 for part in parts)


def test_no_limit_is_one_micro_batch_and_no_sequence_is_none() -> None:
    assert micro_batches([3, 4, 5], MicroBatchLimits()) == [[0, 1, 2]]
    assert micro_batches([], MicroBatchLimits(tokens=5)) == []


def test_not_more_micro_batches_than_needed() -> None:
    for lengths in batches():
        if lengths:
            by_count = micro_batches(lengths, MicroBatchLimits(sequences=4))
            assert len(by_count) <= -(-len(lengths) // 4) + len(lengths) // 2
            equal = micro_batches([5] * len(lengths), MicroBatchLimits(sequences=4, tokens=20))
            assert len(equal) == -(-len(lengths) // 4)


@pytest.mark.parametrize("ranks", [1, 2, 4, 60])
@pytest.mark.parametrize("limits", LIMITS)
def test_assignment_covers_the_batch(limits: MicroBatchLimits, ranks: int) -> None:
    for lengths in batches(40):
        assigned = assign(lengths, ranks, limits)
        assert len(assigned) == ranks
        flat = [number for rank in assigned for part in rank for number in part]
        assert sorted(flat) == list(range(len(lengths)))
        for rank in assigned:
            assert all(rank) and (limits.sequences is None or all(len(part) <= limits.sequences for part in rank))
        if len(lengths) < ranks:
            assert assigned.count([]) == ranks - len(lengths)
        assert assigned == assign(list(lengths), ranks, limits)


@pytest.mark.parametrize("limits", [MicroBatchLimits(), MicroBatchLimits(sequences=3), MicroBatchLimits(tokens=40)])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_pairs_stay_side_by_side(limits: MicroBatchLimits, ranks: int) -> None:
    lengths = [3, 30, 14, 9, 2, 2, 25, 26, 7, 1]
    packs = [pack for rank in assign(lengths, ranks, limits, group_size=2) for pack in rank]
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    for pack in packs:
        assert all(second == first + 1 and first % 2 == 0 for first, second in zip(pack[::2], pack[1::2], strict=True))
        if limits.sequences:
            assert len(pack) <= 2
        if limits.tokens and len(pack) > 2:
            assert sum(lengths[number] for number in pack) <= limits.tokens


def test_an_odd_sequence_has_no_pair() -> None:
    with pytest.raises(ValueError, match="no multiple of 2"):
        assign([1, 2, 3], 1, MicroBatchLimits(), group_size=2)
