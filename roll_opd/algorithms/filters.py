"""Filters of groups by their rewards. What a filter is called with are its keyword arguments."""

from collections.abc import Callable, Sequence

import numpy as np


def mean_filter(rewards: Sequence[float], *, threshold_down: float, threshold_up: float) -> bool:
    """Whether the mean lies between the thresholds, exclusive: neither hopeless nor already solved."""
    return bool(threshold_down < np.mean(rewards) < threshold_up)


def std_filter(rewards: Sequence[float], *, std_threshold: float) -> bool:
    """Whether the standard deviation (of the population) is above the threshold: the samples differ."""
    return bool(np.std(rewards) > std_threshold)


FILTERS: dict[str, Callable[..., bool]] = {"mean_filter": mean_filter, "std_filter": std_filter}
