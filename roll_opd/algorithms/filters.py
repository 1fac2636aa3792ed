"""Filters of groups by their rewards; keyword arguments come from the configuration."""

from collections.abc import Callable, Sequence

import numpy as np


def mean_filter(rewards: Sequence[float], *, threshold_down: float, threshold_up: float) -> bool:
    """Return whether the mean is strictly between the thresholds: neither unsolved nor solved."""
    return bool(threshold_down < np.mean(rewards) < threshold_up)


def std_filter(rewards: Sequence[float], *, std_threshold: float) -> bool:
    """Return whether the population standard deviation is above the threshold."""
    return bool(np.std(rewards) > std_threshold)


FILTERS: dict[str, Callable[..., bool]] = {"mean_filter": mean_filter, "std_filter": std_filter}
