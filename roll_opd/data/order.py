"""Draw order of prompts: endless, from one or several weighted streams, without stored state but counts.

The order within an epoch depends only on seed, epoch and stream number; the next stream depends on the number of
prompts taken from each. So the counts are the complete state.
"""

from collections.abc import Sequence

import numpy as np


def next_stream(weights: np.ndarray, taken: np.ndarray) -> int:
    """Return the number of the stream that is furthest below its share.

    `weights` f64 [S] sum to 1; `taken` int64 [S] counts the prompts taken from each stream. Starting at zeros, any n
    consecutive draws hold `weights * n` prompts of each stream, within two prompts.
    """
    return int(np.argmax(weights * (taken.sum() + 1) - taken))


def epoch_order(seed: int, epoch: int, stream: int, size: int) -> np.ndarray:
    """Return the permutation of a stream's `size` prompts in an epoch, int64 [size]."""
    return np.random.Generator(np.random.PCG64([seed, epoch, stream])).permutation(size)


class DrawOrder:
    """Endless sequence of prompt numbers; each stream has its own epochs."""

    def __init__(self, members: Sequence[np.ndarray], weights: Sequence[float], seed: int) -> None:
        """`members`: the prompt numbers of each stream, int64; the weight of an empty stream must be 0."""
        self._members, self._seed = members, seed
        self._weights = np.asarray(weights, dtype=np.float64) / sum(weights)
        self.taken = np.zeros(len(members), dtype=np.int64)  # prompts taken from each stream
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # stream -> (epoch, permutation), cached

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
    """Return a 31-bit seed derived from `numbers`, all at least 0, and their order."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0] & 0x7FFFFFFF)
