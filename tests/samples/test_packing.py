"""Properties of the split of sequences into ranks and micro-batches, for many random batches."""

import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from roll_opd.config.plan import MicroBatchLimits
from roll_opd.samples.micro_batches import (
    Unit,
    assign,
    micro_batches,
    neighbours,
    relatives,
    shared_prefix,
    singles,
    split_balanced,
)
from tests.each import each

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


def numbers(parts: list[list[Unit]]) -> list[list[int]]:
    return [[number for unit in part for number in unit.numbers] for part in parts]


@each("parts", [1, 2, 3, 8, 50])
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


def test_each_goes_to_the_lightest_part() -> None:
    for lengths in batches(50):
        loads, wanted = [0] * 5, [[] for _ in range(5)]
        for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
            part = min(range(5), key=lambda part: (loads[part], len(wanted[part]), part))
            wanted[part].append(number)
            loads[part] += lengths[number]
        assert split_balanced(lengths, 5) == [sorted(part) for part in wanted]


@each("multiple", [2, 3, 4])
@each("limits", LIMITS)
def test_interleaved_stages_get_a_multiple_of_micro_batches(limits: MicroBatchLimits, multiple: int) -> None:
    for lengths in batches(50):
        parts = numbers(micro_batches(singles(lengths), limits, multiple))
        assert sorted(number for part in parts for number in part) == list(range(len(lengths)))
        assert len(parts) % multiple == 0
        assert all(parts) or len(lengths) < len(parts)


@each("limits", LIMITS)
def test_micro_batches_respect_their_limits(limits: MicroBatchLimits) -> None:
    for lengths in batches():
        parts = numbers(micro_batches(singles(lengths), limits))
        assert sorted(number for part in parts for number in part) == list(range(len(lengths)))
        assert all(parts), "an empty micro-batch would be run for nothing"
        for part in parts:
            assert limits.sequences is None or len(part) <= limits.sequences
            tokens = sum(lengths[number] for number in part)
            assert limits.tokens is None or tokens <= max(limits.tokens, max(lengths))
        assert parts == numbers(micro_batches(singles(lengths), limits))


def test_a_sequence_over_the_limit_is_alone_where_it_must_be() -> None:
    parts = numbers(micro_batches(singles([150, 40, 40, 40]), MicroBatchLimits(tokens=100)))
    assert [0] in parts
    assert all(sum((150, 40, 40, 40)[number] for number in part) <= 150 for part in parts)


def test_no_limit_is_one_micro_batch_and_no_sequence_is_none() -> None:
    assert numbers(micro_batches(singles([3, 4, 5]), MicroBatchLimits())) == [[0, 1, 2]]
    assert micro_batches([], MicroBatchLimits(tokens=5)) == []


def test_not_more_micro_batches_than_needed() -> None:
    for lengths in batches():
        if lengths:
            by_count = micro_batches(singles(lengths), MicroBatchLimits(sequences=4))
            assert len(by_count) <= -(-len(lengths) // 4) + len(lengths) // 2
            equal = micro_batches(singles([5] * len(lengths)), MicroBatchLimits(sequences=4, tokens=20))
            assert len(equal) == -(-len(lengths) // 4)


@each("ranks", [1, 2, 4, 60])
@each("limits", LIMITS)
def test_assignment_covers_the_batch(limits: MicroBatchLimits, ranks: int) -> None:
    for lengths in batches(40):
        assigned = assign(singles(lengths), ranks, limits)
        assert len(assigned) == ranks
        flat = [number for rank in assigned for part in rank for number in part]
        assert sorted(flat) == list(range(len(lengths)))
        for rank in assigned:
            assert all(rank) and (limits.sequences is None or all(len(part) <= limits.sequences for part in rank))
        if len(lengths) < ranks:
            assert assigned.count([]) == ranks - len(lengths)
        assert assigned == assign(singles(lengths), ranks, limits)


@each("limits", [MicroBatchLimits(), MicroBatchLimits(sequences=3), MicroBatchLimits(tokens=40)])
@each("ranks", [1, 2, 5])
def test_pairs_stay_side_by_side(limits: MicroBatchLimits, ranks: int) -> None:
    lengths = [3, 30, 14, 9, 2, 2, 25, 26, 7, 1]
    packs = [pack for rank in assign(neighbours(lengths, 2), ranks, limits) for pack in rank]
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    for pack in packs:
        assert all(second == first + 1 and first % 2 == 0 for first, second in zip(pack[::2], pack[1::2], strict=True))
        if limits.sequences:
            assert len(pack) <= 2
        if limits.tokens and len(pack) > 2:
            assert sum(lengths[number] for number in pack) <= limits.tokens


def test_an_odd_sequence_has_no_pair() -> None:
    with pytest.raises(ValueError, match="not a multiple of 2"):
        neighbours([1, 2, 3], 2)


def families(seed: int) -> list[tuple[np.ndarray, int]]:
    """Return sequences with a shared prompt, conversations with branches, and unrelated sequences, in any order."""
    rng = np.random.default_rng(seed)
    found: list[tuple[np.ndarray, int]] = []
    for _ in range(rng.integers(1, 5)):
        tokens = rng.integers(0, 3, rng.integers(0, 30))
        for _ in range(rng.integers(1, 4)):
            prompt = max(1, len(tokens))
            for _ in range(rng.integers(1, 4)):
                found.append((np.concatenate([tokens, rng.integers(0, 3, rng.integers(1, 20))]), prompt))
            tokens = np.concatenate([found[-1][0], rng.integers(0, 3, 2)])
    return [found[number] for number in rng.permutation(len(found))]


def naive_shared_prefix(earlier: np.ndarray, tokens: np.ndarray, prompt: int) -> int:
    length = 0
    while length < min(len(earlier), prompt) and earlier[length] == tokens[length]:
        length += 1
    return length if 8 * length >= len(tokens) else 0


@each("ranks", [1, 2, 4, 60])
@each("limits", LIMITS)
def test_relatives_are_read_together_where_that_is_less_work(limits: MicroBatchLimits, ranks: int) -> None:
    for seed in range(30):
        sequences = families(seed)
        lengths = [len(tokens) for tokens, _ in sequences]
        units = relatives(sequences, ranks, limits)
        assert sorted(number for unit in units for number in unit.numbers) == list(range(len(lengths)))
        for unit in units:
            saved = 0
            for before, number in pairwise(unit.numbers):
                shared = shared_prefix(sequences[before][0], *sequences[number])
                assert 0 < shared == naive_shared_prefix(sequences[before][0], *sequences[number])
                saved += shared
            assert unit.tokens == sum(lengths[number] for number in unit.numbers) - saved
            assert len(unit.numbers) == 1 or unit.tokens <= (limits.tokens or unit.tokens)
            assert len(unit.numbers) <= (limits.sequences or len(unit.numbers))
        assert most_tokens(units, ranks) <= most_tokens(singles(lengths), ranks)


def test_each_follows_the_one_that_it_shares_most_with() -> None:
    for seed in range(30):
        sequences = families(seed)
        for unit in relatives(sequences, 1, MicroBatchLimits()):
            for place, (before, number) in enumerate(pairwise(unit.numbers), start=1):
                earlier = [sequences[other][0] for other in unit.numbers[:place]]
                best = max(naive_shared_prefix(other, *sequences[number]) for other in earlier)
                assert best == shared_prefix(sequences[before][0], *sequences[number])


def most_tokens(units: list[Unit], ranks: int) -> int:
    tokens = [unit.tokens for unit in units]
    return max(sum(tokens[number] for number in part) for part in split_balanced(tokens, ranks))


def test_relatives_part_where_a_rank_would_idle() -> None:
    same = [(np.array([7, 7, *range(10 * n, 10 * n + 10)]), 2) for n in range(4)]
    assert relatives(same, 1, MicroBatchLimits()) == [Unit((0, 1, 2, 3), 2 + 4 * 10)]
    assert relatives(same, 2, MicroBatchLimits()) == [Unit((0, 1), 22), Unit((2, 3), 22)]
    assert relatives(same, 4, MicroBatchLimits()) == singles([12] * 4)


@each("limits", LIMITS[1:])
def test_one_micro_batch_less_would_not_do(limits: MicroBatchLimits) -> None:
    """With equal parts, one of them would exceed the limits."""
    for lengths in batches():
        found = len(micro_batches(singles(lengths), limits))
        tokens = max(limits.tokens or sum(lengths), max(lengths, default=0))
        at_least = max(-(-len(lengths) // (limits.sequences or len(lengths) or 1)), -(-sum(lengths) // max(tokens, 1)))
        assert found >= at_least
        if found > at_least:
            parts = split_balanced(lengths, found - 1)
            too_many = any(len(part) > (limits.sequences or len(part)) for part in parts)
            assert too_many or any(sum(lengths[n] for n in part) > tokens for part in parts)


LONG = MicroBatchLimits(tokens=16384)
Assigned = list[list[list[int]]]  # rank -> micro-batch -> numbers of sequences


def long_tailed(count: int, *, shortest: int = 16, longest: int = 16384) -> list[int]:
    """Responses as reasoning models write them: half below 1,800 tokens, one in a hundred beyond 16,000."""
    drawn = np.random.default_rng(0).lognormal(7.5, 1.0, count)
    return np.clip(drawn, shortest, longest).astype(int).tolist()


def within_a_second(compute: Callable[[], Assigned]) -> Assigned:
    """Return the result of `compute`, which takes a second of CPU time in one of three attempts.

    Other processes on the same core slow an attempt down, and coverage's tracer all of them: it is off here.
    """
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        for _ in range(3):
            began = time.process_time()
            result = compute()
            if time.process_time() - began < 1.0:
                return result
    finally:
        sys.settrace(tracer)
    pytest.fail("more than a second of CPU time, three times")


@each("equal", [False, True])
@each("kind", ["long-tailed", "more than half a micro-batch", "more than a third"])
def test_a_large_batch_is_planned_in_no_time(kind: str, equal: bool) -> None:
    """8,192 sequences for 64 ranks; the last two kinds fill micro-batches so badly that many numbers are tried."""
    rng = np.random.default_rng(1)
    lengths = {
        "long-tailed": long_tailed(8192),
        "more than half a micro-batch": rng.integers(8300, 10200, 8192).tolist(),
        "more than a third": rng.integers(5500, 6000, 8192).tolist(),
    }[kind]
    assigned = within_a_second(lambda: assign(singles(lengths), 64, LONG, multiple=4, equal=equal))
    loads = [sum(lengths[n] for part in rank for n in part) for rank in assigned]
    assert max(loads) <= 1.03 * sum(loads) / len(loads)


def test_a_large_batch_of_families_is_planned_in_no_time() -> None:
    """8,192 answers to 1,024 prompts."""
    rng = np.random.default_rng(2)
    sequences = []
    for prompt in rng.integers(100, 400, 1024).tolist():
        shared = rng.integers(0, 150_000, prompt)
        for length in np.clip(rng.lognormal(6.0, 1.0, 8), 16, 8192).astype(int).tolist():
            sequences.append((np.concatenate([shared, rng.integers(0, 150_000, length)]), prompt))
    assigned = within_a_second(lambda: assign(relatives(sequences, 64, LONG), 64, LONG))
    assert sum(len(part) for rank in assigned for part in rank) == len(sequences)


@each(("tensor", "context"), [(1, 1), (8, 1), (2, 4)])
def test_little_of_a_long_tailed_batch_is_padding_or_waiting(tensor: int, context: int) -> None:
    """Padding of packs and, with context parallelism, of sequences; and waiting of ranks in each micro-batch."""
    lengths = long_tailed(8192)
    pieces = 2 * context if context > 1 else 1
    whole = [-(-length // pieces) * pieces for length in lengths]
    multiple = math.lcm(tensor, 32) * context
    ranks = 64 // (tensor * context)
    assigned = assign(singles(lengths), ranks, LONG, equal=True)
    packs = [[-(-sum(whole[n] for n in part) // multiple) * multiple for part in rank] for rank in assigned]
    computed = sum(map(sum, packs))
    assert computed - sum(lengths) < 0.01 * computed
    waited_for = sum(max(packs_of_a_turn) for packs_of_a_turn in zip(*packs, strict=True)) * ranks
    assert waited_for - sum(lengths) < 0.03 * waited_for
