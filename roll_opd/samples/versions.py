"""Versions of the weights that sampled a response, as runs of (version, tokens).

`((3, 12), (None, 5), (4, 9))`: version 3 sampled 12 tokens, 5 tokens were not sampled (an observation or a user's
turn), and version 4 sampled 9. The runs cover the whole response. `()`: unknown, or nothing was sampled.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

Versions = tuple[tuple[int | None, int], ...]


def concatenated(parts: Iterable[Versions]) -> Versions:
    """Return the runs of consecutive parts of a response; neighbouring runs of one version become one."""
    runs: list[tuple[int | None, int]] = []
    for version, tokens in (run for part in parts for run in part):
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + tokens)
        elif tokens:
            runs.append((version, tokens))
    return tuple(runs)


def truncated(runs: Versions, tokens: int) -> Versions:
    """Return the runs of the first `tokens` tokens."""
    kept = []
    for version, length in runs:
        if tokens > 0:
            kept.append((version, min(length, tokens)))
        tokens -= length
    return tuple(kept)


def of_mask(action_mask: np.ndarray, version: int) -> Versions:
    """Return the runs of a response whose action tokens were all sampled by `version`."""
    return concatenated([((version if sampled else None, 1),) for sampled in action_mask.tolist()])


def sampling_versions(runs: Versions) -> set[int]:
    """Return all versions that sampled at least one token of a response."""
    return {version for version, tokens in runs if version is not None and tokens}


def tokens_by_version(responses: Iterable[Versions]) -> Counter[int]:
    """Return the number of sampled tokens of each version, over several responses."""
    counts: Counter[int] = Counter()
    for version, tokens in (run for runs in responses for run in runs):
        if version is not None and tokens:
            counts[version] += tokens
    return counts
