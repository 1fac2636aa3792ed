"""Versions of the weights that sampled a response, stored as runs (version, number of tokens).

For example, `((3, 12), (None, 5), (4, 9))` describes a response of 26 tokens. Version 3 sampled the first 12 tokens.
The next 5 tokens were not sampled: they are an observation or a user's turn. Version 4 sampled the last 9 tokens.

The runs cover the whole response. The value `()` means that the versions are unknown, or that no token was sampled.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

Versions = tuple[tuple[int | None, int], ...]


def concatenated(parts: Iterable[Versions]) -> Versions:
    """Return the runs of a response from the runs of its consecutive parts.

    Neighbouring runs of the same version are joined.
    """
    runs: list[tuple[int | None, int]] = []
    for version, tokens in (run for part in parts for run in part):
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + tokens)
        elif tokens:
            runs.append((version, tokens))
    return tuple(runs)


def truncated(runs: Versions, tokens: int) -> Versions:
    """Return the runs of the first `tokens` tokens of a response."""
    kept = []
    for version, length in runs:
        if tokens > 0:
            kept.append((version, min(length, tokens)))
        tokens -= length
    return tuple(kept)


def of_mask(action_mask: np.ndarray, version: int) -> Versions:
    """Return the versions of a response that one version sampled; observed tokens have None."""
    return concatenated([((version if sampled else None, 1),) for sampled in action_mask.tolist()])


def sampling_versions(runs: Versions) -> set[int]:
    """Return the set of versions that sampled at least one token of a response."""
    return {version for version, tokens in runs if version is not None and tokens}


def tokens_by_version(responses: Iterable[Versions]) -> Counter[int]:
    """Return a map from each version to the number of tokens that it sampled in all responses together."""
    counts: Counter[int] = Counter()
    for version, tokens in (run for runs in responses for run in runs):
        if version is not None and tokens:
            counts[version] += tokens
    return counts
