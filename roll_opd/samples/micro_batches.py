"""Assign a batch's samples to data-parallel ranks and micro-batches, and split the batch into one shard per rank.

The driver computes the assignment once. The assignment is deterministic and balances the number of tokens. There is no
padding. Each shard also has templates. A template is a sample without response tokens, and there is one template for
each set of columns that occurs in the batch. Because of the templates, all ranks build the same columns.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_opd.config.plan import MicroBatchLimits
from roll_opd.samples.sample import Sample, TargetRef
from roll_opd.samples.transport import Compact

ROUTER_LOSSES = ("z_loss", "load_balancing_loss")  # sums of a `TrainResult` that only mixtures of experts have
Assignment = list[list[list[int]]]  # for each data-parallel rank, micro-batches as lists of sample numbers
SHORTEST_SHARE = 1 / 8  # fraction of a sequence; sharing a shorter prefix saves less than its attention mask costs


@dataclass(frozen=True)
class Unit:
    """Sequences that stay in one micro-batch."""

    numbers: tuple[int, ...]
    tokens: int  # number of tokens that the model computes for the unit


@dataclass(frozen=True)
class _Relative:
    number: int
    length: int
    shared: int  # number of tokens in the prefix shared with the previous member


def singles(lengths: Sequence[int]) -> list[Unit]:
    """Return one unit for each sequence."""
    return [Unit((number,), length) for number, length in enumerate(lengths)]


def neighbours(lengths: Sequence[int], size: int) -> list[Unit]:
    """Return units of `size` consecutive sequences.

    Raises ValueError if the number of sequences is not a multiple of `size`.
    """
    if len(lengths) % size:
        raise ValueError(
            f"{len(lengths)} sequences are not a multiple of {size}, the number of sequences that belong together"
        )
    starts = range(0, len(lengths), size)
    return [Unit(tuple(range(start, start + size)), sum(lengths[start : start + size])) for start in starts]


def shared_prefix(earlier: np.ndarray, tokens: np.ndarray, prompt_length: int) -> int:
    """Return the length of the prompt prefix that a sequence shares with an earlier sequence.

    The model computes a shared prefix only once. The returned length is 0 if the prefix is so short that sharing it
    would cost more in the attention mask than it saves.

    Args:
        earlier: int64 [T], the earlier sequence.
        tokens: int64 [T], the sequence itself.
        prompt_length: prompt length of `tokens`.
    """
    end = min(len(earlier), prompt_length)
    differing = np.flatnonzero(earlier[:end] != tokens[:end])
    length = int(differing[0]) if len(differing) else end
    return length if length >= SHORTEST_SHARE * len(tokens) else 0


def relatives(sequences: Sequence[tuple[np.ndarray, int]], ranks: int, limits: MicroBatchLimits) -> list[Unit]:
    """Return units in which each sequence shares a prefix with the sequence before it.

    The model computes the shared prefix only once. The size of the units is chosen so that the rank with the most
    tokens has as few tokens as possible.

    Args:
        sequences: pairs of tokens, int64 [T], and prompt length.
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
    """Split sequences with shared prefixes into units.

    A unit has at most `size` sequences. A unit of several sequences also stays within `limits`.
    """
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
    """Split sequence indices into `parts` lists of nearly equal total length.

    The sequences are assigned one after the other, longest first. Each sequence goes to the part with the fewest
    tokens. If several parts have equally few tokens, the sequence goes to the part with the fewest sequences, and then
    to the first such part. Each list is in ascending order. No list is empty if there are at least `parts` sequences.
    """
    bins: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, 0, part) for part in range(parts)]  # heap of (number of tokens, number of sequences, part)
    for number in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        tokens, sequences, part = lightest[0]
        bins[part].append(number)
        heapq.heapreplace(lightest, (tokens + lengths[number], sequences + 1, part))
    return [sorted(part) for part in bins]


def micro_batches(
    units: Sequence[Unit], limits: MicroBatchLimits, multiple: int = 1, at_least: int = 0
) -> list[list[Unit]]:
    """Split units into balanced micro-batches within the limits.

    The number of micro-batches is a multiple of `multiple`, at least `at_least`, and as small as possible. If there are
    fewer units than micro-batches, some micro-batches are empty. A unit is never split. If a unit exceeds a limit, the
    limit is raised to the size of the unit.
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
    """Return `start` if it fits, else a larger number that fits and whose predecessor does not fit.

    The search is a galloping search: the step is doubled until a number fits, and then the last interval is bisected.
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
    """Return the micro-batches of each rank, as lists of sequence indices; see `micro_batches`.

    If `equal` is true, all ranks get the same number of micro-batches. This number is at least the largest number that
    a rank needs.
    """
    shares = [[units[n] for n in share] for share in split_balanced([unit.tokens for unit in units], ranks)]
    split = [micro_batches(share, limits, multiple) for share in shares]
    if equal and len({len(parts) for parts in split}) > 1:
        return _equal(shares, split, limits, multiple)
    return [_numbers(parts) for parts in split]


def _equal(
    shares: Sequence[list[Unit]], split: Sequence[list[list[Unit]]], limits: MicroBatchLimits, multiple: int
) -> list[list[list[int]]]:
    """Return the assignment in which all ranks have the same number of micro-batches.

    This number is the smallest one that is possible for all ranks.
    """
    most = max(map(len, split))
    while True:
        split = [micro_batches(share, limits, multiple, most) for share in shares]
        if len({len(parts) for parts in split}) == 1:
            return [_numbers(parts) for parts in split]
        most = max(map(len, split))


def _numbers(parts: Sequence[Sequence[Unit]]) -> list[list[int]]:
    return [[number for unit in part for number in unit.numbers] for part in parts]


@dataclass(frozen=True)
class Packing:
    """Rules for assigning the sequences of an engine to ranks and micro-batches.

    The limits of a micro-batch are not part of the rules. They are an argument of each call.
    """

    ranks: int  # data-parallel
    multiple: int = 1  # the number of micro-batches is a multiple of this
    equal: bool = False  # whether all ranks get the same number of micro-batches
    share_prefixes: bool = False

    def assign(
        self, sequences: Sequence[tuple[np.ndarray, int]], limits: MicroBatchLimits, group_size: int = 1
    ) -> Assignment:
        """Return the micro-batches of each rank, as lists of sequence indices.

        Args:
            sequences: pairs of tokens, int64 [T], and prompt length.
            limits: limits of a micro-batch.
            group_size: number of consecutive sequences that stay in one micro-batch.
        """
        lengths = [len(tokens) for tokens, _ in sequences]
        if group_size > 1:
            units = neighbours(lengths, group_size)
        elif self.share_prefixes:
            units = relatives(sequences, self.ranks, limits)
        else:
            units = singles(lengths)
        return assign(units, self.ranks, limits, self.multiple, equal=self.equal)


@dataclass(frozen=True)
class DPShard:
    """The part of a batch for one data-parallel rank: first the templates, then the rank's samples.

    The entries of `micro_batches` are indices into `samples`.
    """

    samples: Sequence[Sample]
    micro_batches: list[list[int]]
    held: Sequence[Mapping[str, TargetRef]] = ()  # targets to fetch for each sample, by name; (): no targets


@dataclass(frozen=True)
class ShardedBatch:
    """All shards of a batch.

    `numbers` has, for each sample of a shard, its index in the batch. The entry of a template is -1.
    """

    shards: list[DPShard]
    numbers: list[list[int]]

    def merged(self, answers: Iterable[tuple[int, Mapping[int, Any] | None]]) -> dict[int, Any]:
        """Return a map from the index of a sample in the batch to its value.

        Args:
            answers: pairs of a rank, and a map from the index of a sample in the rank's shard to its value.
        """
        return {
            self.numbers[rank][number]: value for rank, values in answers for number, value in (values or {}).items()
        }


def shard_batch(
    samples: Sequence[Sample], assignment: Assignment, held: Sequence[Mapping[str, TargetRef]] = ()
) -> ShardedBatch:
    """Return the batch, split into shards according to `assignment`.

    Every shard has one template for each layout in the batch. Two samples have the same layout if both or neither of
    them have routes, and if their targets have the same names.

    Args:
        assignment: for each rank, its micro-batches as lists of sample indices.
        held: the targets of each sample, by name. It is empty if there are no targets.
    """
    templates: dict[Hashable, int] = {}
    for number, sample in enumerate(samples):
        templates.setdefault((sample.routes is None, *(held[number] if held else ())), number)
    kinds = list(templates.values())
    shards: list[DPShard] = []
    numbers: list[list[int]] = []
    for micro_batches in assignment:
        own = [number for part in micro_batches for number in part]
        place = {number: len(kinds) + count for count, number in enumerate(own)}
        parts = [[place[number] for number in part] for part in micro_batches]
        message: Any = Compact([*(samples[n].empty() for n in kinds), *(samples[n] for n in own)])
        shards.append(DPShard(message, parts, [held[n] for n in (*kinds, *own)] if held else ()))
        numbers.append([*(-1 for _ in kinds), *own])
    return ShardedBatch(shards, numbers)


@dataclass(frozen=True)
class TrainResult:
    """The result of an update on one rank.

    It has sums over the rank's tokens, and columns of the rank's samples.
    """

    sums: dict[str, float]  # name -> Σ over this rank's action tokens; see `update` in trainer and critic
    # sample number -> f32 [T-P] each: the log-probs before the update, and the advantages that the loss used
    columns: dict[int, dict[str, np.ndarray]]
    grad_norm: float
    learning_rate: float
    applied: bool  # False: a loss or gradient was not finite, so the weights are unchanged
