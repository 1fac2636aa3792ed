"""Which sequence goes to which rank and micro-batch: balanced by tokens, deterministic, nothing padded."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roll_opd.config.plan import MicroBatchLimits

SHORTEST_SHARE = 1 / 8  # of a sequence, that a shared prefix should be: attention needs a mask then


@dataclass(frozen=True)
class Unit:
    """Sequences that stay in one micro-batch."""

    numbers: tuple[int, ...]
    tokens: int  # that the model reads for them


@dataclass(frozen=True)
class _Relative:
    number: int
    length: int
    shared: int  # with the one before it


def singles(lengths: Sequence[int]) -> list[Unit]:
    """Return each sequence as a unit of its own."""
    return [Unit((number,), length) for number, length in enumerate(lengths)]


def neighbours(lengths: Sequence[int], size: int) -> list[Unit]:
    """Return units of `size` consecutive sequences; ValueError where they are no multiple of it."""
    if len(lengths) % size:
        raise ValueError(f"{len(lengths)} sequences are no multiple of {size}, which belong together")
    starts = range(0, len(lengths), size)
    return [Unit(tuple(range(start, start + size)), sum(lengths[start : start + size])) for start in starts]


def shared_prefix(earlier: np.ndarray, tokens: np.ndarray, prompt_length: int) -> int:
    """Return how many tokens of a prompt need not be read again after the sequence `earlier`, which begins with them.

    0 where that saves less than it costs attention. Both int64 [T]; `prompt_length` is of `tokens`.
    """
    end = min(len(earlier), prompt_length)
    differing = np.flatnonzero(earlier[:end] != tokens[:end])
    length = int(differing[0]) if len(differing) else end
    return length if length >= SHORTEST_SHARE * len(tokens) else 0


def relatives(sequences: Sequence[tuple[np.ndarray, int]], ranks: int, limits: MicroBatchLimits) -> list[Unit]:
    """Return units of sequences of which each shares a prefix with the one before it, and is read without it.

    `sequences` are (tokens int64 [T], prompt length) each. Units are as large as leaves the rank with the most tokens
    the fewest.
    """
    order = sorted(range(len(sequences)), key=lambda number: sequences[number][0].tobytes())
    families: list[list[_Relative]] = []
    for place, number in enumerate(order):
        tokens, prompt_length = sequences[number]
        shared = shared_prefix(sequences[order[place - 1]][0], tokens, prompt_length) if place else 0
        member = _Relative(number, len(tokens), shared)
        if shared:
            families[-1].append(member)
        else:
            families.append([member])
    sizes = [max(map(len, families), default=1)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    ways = [[unit for family in families for unit in _cut(family, size, limits)] for size in sizes]
    ways = [sorted(units, key=lambda unit: unit.numbers) for units in ways]
    return min(ways, key=lambda units: _most_tokens(units, ranks))


def _most_tokens(units: Sequence[Unit], ranks: int) -> int:
    tokens = [unit.tokens for unit in units]
    return max(sum(tokens[n] for n in part) for part in split_balanced(tokens, ranks))


def _cut(family: Sequence[_Relative], size: int, limits: MicroBatchLimits) -> list[Unit]:
    """Cut sequences that begin alike into units of at most `size`, and within `limits`."""
    units: list[Unit] = []
    most_tokens = limits.tokens or sum(member.length for member in family)
    size = min(size, limits.sequences or size)
    for member in family:
        own = member.length - member.shared
        last = units[-1] if units else None
        if last and len(last.numbers) < size and last.tokens + own <= most_tokens:
            units[-1] = Unit((*last.numbers, member.number), last.tokens + own)
        else:
            units.append(Unit((member.number,), member.length))
    return units


def split_balanced(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Split sequence numbers into `parts` lists of nearly equal total length; each list ascends.

    Longest first, always to the lightest part (ties: the one with fewer sequences, then the first), so no part is
    empty where there are at least `parts` sequences.
    """
    bins: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, 0, part) for part in range(parts)]  # a heap of (tokens, sequences, part)
    for number in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        tokens, sequences, part = lightest[0]
        bins[part].append(number)
        heapq.heapreplace(lightest, (tokens + lengths[number], sequences + 1, part))
    return [sorted(part) for part in bins]


def micro_batches(
    units: Sequence[Unit], limits: MicroBatchLimits, multiple: int = 1, at_least: int = 0
) -> list[list[Unit]]:
    """Split units into the fewest balanced micro-batches within `limits` whose number is a multiple of `multiple`.

    A single unit beyond the limits is a micro-batch of its own: it cannot be split. Where there are fewer units than
    micro-batches, of which there are `at_least` so many, some are empty.
    """
    if not units:
        return [[] for _ in range(at_least)]
    sequences, tokens = [len(unit.numbers) for unit in units], [unit.tokens for unit in units]
    most_sequences = max(limits.sequences or sum(sequences), max(sequences))
    most_tokens = max(limits.tokens or sum(tokens), max(tokens))
    fewest = max(-(-sum(sequences) // most_sequences), -(-sum(tokens) // most_tokens), at_least)
    splits: dict[int, list[list[int]]] = {}

    def fits(times: int) -> bool:
        splits[times] = parts = split_balanced(tokens, times * multiple)
        return all(
            sum(sequences[n] for n in part) <= most_sequences and sum(tokens[n] for n in part) <= most_tokens
            for part in parts
        )

    return [[units[n] for n in part] for part in splits[_first(fits, -(-fewest // multiple))]]


def _first(fits: Callable[[int], bool], start: int) -> int:
    """Return a number from `start` on that fits, before which, if it is not `start`, is one that does not.

    It is found with few questions, whose distances double and are then halved.
    """
    step, failing = 1, start - 1
    while not fits(number := failing + step):
        failing, step = number, 2 * step
    while number - failing > 1:
        middle = (failing + number) // 2
        failing, number = (failing, middle) if fits(middle) else (middle, number)
    return number


def assign(
    units: Sequence[Unit], ranks: int, limits: MicroBatchLimits, multiple: int = 1, *, equal: bool = False
) -> list[list[list[int]]]:
    """Return, for each rank, its micro-batches of sequence numbers; see `micro_batches`.

    With `equal`, every rank has as many as the one that needs most.
    """
    shares = [[units[n] for n in share] for share in split_balanced([unit.tokens for unit in units], ranks)]
    split = [micro_batches(share, limits, multiple) for share in shares]
    if equal and len({len(parts) for parts in split}) > 1:
        return _equal(shares, split, limits, multiple)
    return [_numbers(parts) for parts in split]


def _equal(
    shares: Sequence[list[Unit]], split: Sequence[list[list[Unit]]], limits: MicroBatchLimits, multiple: int
) -> list[list[list[int]]]:
    """Return what `assign` does with as many micro-batches on each rank: a larger number may not keep to the limits."""
    most = max(map(len, split))
    while True:
        split = [micro_batches(share, limits, multiple, most) for share in shares]
        if len({len(parts) for parts in split}) == 1:
            return [_numbers(parts) for parts in split]
        most = max(map(len, split))


def _numbers(parts: Sequence[Sequence[Unit]]) -> list[list[int]]:
    return [[number for unit in part for number in unit.numbers] for part in parts]
