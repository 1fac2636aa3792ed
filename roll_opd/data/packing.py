"""Which sequence goes to which rank and micro-batch: balanced by tokens, deterministic, nothing padded."""

from collections.abc import Sequence
from dataclasses import replace

from roll_opd.config.plan import MicroBatchLimits


def split_balanced(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Split sequence numbers into `parts` lists of nearly equal total length; each list ascends.

    Longest first, always to the lightest part (ties: the one with fewer sequences, then the first), so no part is
    empty where there are at least `parts` sequences.
    """
    bins: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        lightest = min(range(parts), key=lambda part: (load[part], len(bins[part]), part))
        bins[lightest].append(number)
        load[lightest] += lengths[number]
    return [sorted(part) for part in bins]


def micro_batches(lengths: Sequence[int], limits: MicroBatchLimits) -> list[list[int]]:
    """Split sequence numbers into the fewest balanced micro-batches within `limits`.

    A single sequence longer than `limits.tokens` is a micro-batch of its own: it cannot be split.
    """
    if not lengths:
        return []
    most_sequences = limits.sequences or len(lengths)
    most_tokens = max(limits.tokens or sum(lengths), max(lengths))
    count = max(-(-len(lengths) // most_sequences), -(-sum(lengths) // most_tokens))
    while True:
        parts = split_balanced(lengths, count)
        if all(len(part) <= most_sequences and sum(lengths[n] for n in part) <= most_tokens for part in parts):
            return parts
        count += 1


def assign(lengths: Sequence[int], ranks: int, limits: MicroBatchLimits, group_size: int = 1) -> list[list[list[int]]]:
    """Return, for each rank, its micro-batches of sequence numbers.

    `group_size` consecutive sequences are kept in one micro-batch, even where they are more than `limits` allow.
    ValueError where the sequences are no multiple of `group_size`.
    """
    if len(lengths) % group_size:
        raise ValueError(f"{len(lengths)} sequences are no multiple of {group_size}, which belong together")
    units = [sum(lengths[start : start + group_size]) for start in range(0, len(lengths), group_size)]
    if limits.sequences:
        limits = replace(limits, sequences=max(1, limits.sequences // group_size))
    assigned = []
    for mine in split_balanced(units, ranks):
        local = micro_batches([units[unit] for unit in mine], limits)
        starts = [[mine[index] * group_size for index in part] for part in local]
        assigned.append([[start + place for start in part for place in range(group_size)] for part in starts])
    return assigned
