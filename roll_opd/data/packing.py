"""Which sequence goes to which rank and micro-batch: balanced by tokens, deterministic, nothing padded."""

from collections.abc import Sequence

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


def assign(lengths: Sequence[int], ranks: int, limits: MicroBatchLimits) -> list[list[list[int]]]:
    """Return, for each rank, its micro-batches of sequence numbers."""
    assigned = []
    for mine in split_balanced(lengths, ranks):
        local = micro_batches([lengths[number] for number in mine], limits)
        assigned.append([[mine[index] for index in part] for part in local])
    return assigned
