"""Filters that keep or drop a group by its rewards, and ROLL's masks and weights of single samples.

Legend: B samples. Samples of one prompt share a group.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np


def mean_filter(rewards: Sequence[float], *, threshold_down: float, threshold_up: float) -> bool:
    """Return whether the mean of the rewards is strictly between the thresholds.

    Such a prompt is neither too hard nor too easy.
    """
    return bool(threshold_down < np.mean(rewards) < threshold_up)


def std_filter(rewards: Sequence[float], *, std_threshold: float) -> bool:
    """Return whether the population standard deviation of the rewards is above the threshold."""
    return bool(np.std(rewards) > std_threshold)


FILTERS: dict[str, Callable[..., bool]] = {"mean_filter": mean_filter, "std_filter": std_filter}


def below_longest(lengths: Sequence[int], longest: int) -> list[bool]:
    """Return a mask [B] of responses that are shorter than the maximum length (`max_len_mask`).

    Responses of the maximum length are probably truncated.
    """
    return [length < longest for length in lengths]


def between_difficulties(
    rewards: Sequence[float | None], groups: Sequence[str], *, low: float, high: float
) -> list[bool]:
    """Return a mask [B] of samples in groups of medium difficulty (`difficulty_mask`).

    The mean reward of such a group is strictly between `low` and `high`. Samples without a reward are not counted in
    the mean. A group without any reward is kept.
    """
    by_group: dict[str, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            by_group[group].append(reward)
    outside = {group for group, found in by_group.items() if not low < sum(found) / len(found) < high}
    return [group not in outside for group in groups]


def right_or_short(rewards: Sequence[float | None], lengths: Sequence[int], *, threshold: int) -> list[bool]:
    """Return a mask [B] of samples that are right or short.

    A sample is kept if its reward is 1 or if it has no reward. A sample with reward 0 is kept if it has fewer than
    `threshold` tokens.
    """
    return [
        reward in (None, 1) or (reward == 0 and length < threshold)
        for reward, length in zip(rewards, lengths, strict=True)
    ]


def sample_weights(
    lengths: Sequence[int], difficulties: Sequence[float | None] | None, *, by_length: bool
) -> list[float]:
    """Return the weights [B] of the samples of an update, with mean 1.

    The weight of a sample is the product of two factors, divided by the mean of these products.

    The first factor is used with `difficulty_loss_weight`. It is 0.5 + 1.5 · difficulty, with the difficulty clipped to
    [0, 1]. For a sample without a difficulty, it is 1.

    The second factor is used with `length_loss_weight`. It falls linearly with the length of the response, from 1.5 for
    the shortest response to 0.5 for the longest response.

    Args:
        lengths: number of response tokens of each sample.
        difficulties: difficulty of each sample, from the rows of the data; None: the first factor is not used.
        by_length: whether the second factor is used.
    """
    weights = [1.0] * len(lengths)
    if difficulties is not None:
        weights = [1.0 if known is None else 0.5 + 1.5 * min(max(known, 0.0), 1.0) for known in difficulties]
    if by_length and lengths:
        shortest, span = min(lengths), max(lengths) - min(lengths)
        factors = [1.5 - ((length - shortest) / span if span else 0.0) for length in lengths]
        weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    mean = sum(weights) / len(weights) if weights else 1.0
    return [weight / mean for weight in weights]
