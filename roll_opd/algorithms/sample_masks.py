"""Filters that select groups by reward, and ROLL's masks and weights of samples by length, difficulty and correctness.

Legend: B samples. Samples of one prompt share a group.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np


def mean_filter(rewards: Sequence[float], *, threshold_down: float, threshold_up: float) -> bool:
    """Return whether the mean is strictly between the thresholds.

    The prompt is then neither too hard nor too easy.
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
    """Return a mask [B] of samples whose group has a mean reward strictly between `low` and `high` (`difficulty_mask`).

    Rewards of None are ignored. A group without any reward is kept.
    """
    by_group: dict[str, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            by_group[group].append(reward)
    outside = {group for group, found in by_group.items() if not low < sum(found) / len(found) < high}
    return [group not in outside for group in groups]


def right_or_short(rewards: Sequence[float | None], lengths: Sequence[int], *, threshold: int) -> list[bool]:
    """Return a mask [B] of samples with reward 1 or None, or with reward 0 and fewer than `threshold` tokens."""
    return [
        reward in (None, 1) or (reward == 0 and length < threshold)
        for reward, length in zip(rewards, lengths, strict=True)
    ]


def sample_weights(
    lengths: Sequence[int], difficulties: Sequence[float | None] | None, *, by_length: bool
) -> list[float]:
    """Return the weights [B] of an update's samples, with mean 1.

    A weight is the product of two factors, divided by the mean of these products. With `difficulty_loss_weight`, the
    first factor is 0.5 + 1.5 · difficulty, with the difficulty clipped to [0, 1]; for a sample without a difficulty,
    the factor is 1. With `length_loss_weight`, the second factor is 1.5 - (length - shortest) / (longest - shortest). A
    factor that is not configured is 1.

    Args:
        lengths: number of response tokens.
        difficulties: difficulty of each sample, from the rows; None: difficulties are not used.
        by_length: whether the weights depend on the lengths.
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
