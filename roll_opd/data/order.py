"""In which order a run takes its prompts: endless, from one or several streams, and a function of a few numbers.

The order of an epoch of a stream depends on the seed, the epoch and the stream's number alone, and which stream is
next depends on how many prompts each has given. So the counts are the whole state.
"""

from collections.abc import Sequence

import numpy as np


def next_stream(weights: np.ndarray, taken: np.ndarray) -> int:
    """Return the stream that is furthest behind its share.

    `weights` f64 [S] sum to 1 and `taken` int64 [S] counts the prompts that each stream has given. Followed from
    zeros, any run of n prompts holds `weights * n` of each stream but for a prompt or two.
    """
    return int(np.argmax(weights * (taken.sum() + 1) - taken))


def epoch_order(seed: int, epoch: int, stream: int, size: int) -> np.ndarray:
    """Return a permutation of `size` numbers, int64 [size]."""
    return np.random.Generator(np.random.PCG64([seed, epoch, stream])).permutation(size)


class DrawOrder:
    """The endless sequence of prompt numbers.

    Each stream runs through its own epochs: a small stream with a large weight comes round more often.
    """

    def __init__(self, members: Sequence[np.ndarray], weights: Sequence[float], seed: int) -> None:
        """`members`: the prompt numbers of each stream, int64; a stream without any must weigh 0."""
        self._members, self._seed = members, seed
        self._weights = np.asarray(weights, dtype=np.float64) / sum(weights)
        self.taken = np.zeros(len(members), dtype=np.int64)  # prompts given by each stream
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # stream -> (epoch, permutation), the newest one used

    def take(self, n: int) -> list[int]:
        """Return the next `n` prompt numbers."""
        return [self._next() for _ in range(n)]

    def _next(self) -> int:
        stream = next_stream(self._weights, self.taken)
        members = self._members[stream]
        epoch, offset = divmod(int(self.taken[stream]), len(members))
        if stream not in self._orders or self._orders[stream][0] != epoch:
            self._orders[stream] = epoch, epoch_order(self._seed, epoch, stream, len(members))
        self.taken[stream] += 1
        return int(members[self._orders[stream][1][offset]])


def derived_seed(*numbers: int) -> int:
    """Return a seed of 31 bits that depends on `numbers`, all at least 0, and their order."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0] & 0x7FFFFFFF)
