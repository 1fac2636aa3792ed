"""Shard a batch over data-parallel ranks: the assignment of samples to ranks and micro-batches is computed once.

A shard carries the numbers of the whole batch that a rank needs, and one template sample for each set of arrays that
samples of the batch have: a sample without a scored token, so that all ranks build the same columns.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from roll_opd.config.plan import MicroBatchLimits
from roll_opd.samples.buffer_pickle import Compact
from roll_opd.samples.packing import assign, neighbours, relatives, singles
from roll_opd.samples.training import TargetRef

Item = TypeVar("Item")
Assignment = list[list[list[int]]]  # of each data-parallel rank, its micro-batches of sample numbers


@dataclass(frozen=True)
class Packing:
    """How an engine spreads sequences: what `samples.packing` is called with, beside limits."""

    ranks: int  # data-parallel
    multiple: int = 1  # of which the number of micro-batches is one
    equal: bool = False  # as many micro-batches on every rank
    share_prefixes: bool = False

    def assign(
        self, sequences: Sequence[tuple[np.ndarray, int]], limits: MicroBatchLimits, group_size: int = 1
    ) -> Assignment:
        """Return each rank's micro-batches of `sequences`, (tokens int64 [T], prompt length) each.

        `group_size` consecutive ones stay together.
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
class DPShard(Generic[Item]):
    """One data-parallel rank's part of a batch. Numbers index `samples`: the template samples, then the rank's own."""

    samples: Sequence[Item]
    micro_batches: list[list[int]]
    held: Sequence[Mapping[str, TargetRef]] = ()  # of each sample, what it needs and did not bring; none: nothing


@dataclass(frozen=True)
class ShardedBatch(Generic[Item]):
    """All shards of a batch, and for each the batch's numbers of its samples, -1 for template samples."""

    shards: list[DPShard[Item]]
    numbers: list[list[int]]

    def merged(self, answers: Iterable[tuple[int, Mapping[int, Any] | None]]) -> dict[int, Any]:
        """Return by the batch's numbers what (data-parallel rank, values by its shard's numbers) say."""
        return {
            self.numbers[rank][number]: value for rank, values in answers for number, value in (values or {}).items()
        }


def shard_batch(
    samples: Sequence[Item],
    assignment: Assignment,
    layouts: Sequence[Hashable],
    emptied: Callable[[Item], Item],
    **of_samples: Sequence[Any],
) -> ShardedBatch[Item]:
    """Return the batch sharded by `assignment`.

    Args:
        layouts: of each sample, which arrays it has. Every shard has a template sample of each layout, in the order of
            the batch.
        emptied: makes a template sample of a sample.
        of_samples: fields of `DPShard`, of each sample; empty ones stay empty.
    """
    kinds: dict[Hashable, int] = {}
    for number, layout in enumerate(layouts):
        kinds.setdefault(layout, number)
    seen = list(kinds.values())
    templates = [emptied(samples[number]) for number in seen]
    shards: list[DPShard[Item]] = []
    numbers: list[list[int]] = []
    for micro_batches in assignment:
        own = [number for part in micro_batches for number in part]
        place = {number: len(seen) + count for count, number in enumerate(own)}
        given: dict[str, Any] = {
            name: [values[n] for n in (*seen, *own)] for name, values in of_samples.items() if len(values)
        }
        parts = [[place[number] for number in part] for part in micro_batches]
        on_the_way: Any = Compact([*templates, *(samples[number] for number in own)])
        shards.append(DPShard(on_the_way, parts, **given))
        numbers.append([*(-1 for _ in seen), *own])
    return ShardedBatch(shards, numbers)
