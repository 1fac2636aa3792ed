"""A batch's tokens end to end, [M], and back: one pass over a flat array in place of one a sample."""

import itertools
from collections.abc import Sequence

import numpy as np

from roll_opd.samples.experience import Experience


def joined_masks(experiences: Sequence[Experience]) -> np.ndarray:
    """Return the action masks end to end, bool [M]."""
    return np.concatenate([np.zeros(0, bool), *[e.action_mask for e in experiences]])


def split_by_sample(values_M: np.ndarray, experiences: Sequence[Experience]) -> list[np.ndarray]:
    """Return each sample's part, a view [T-P]."""
    ends = list(itertools.accumulate(e.response_length for e in experiences))
    return [values_M[end - e.response_length : end] for e, end in zip(experiences, ends, strict=True)]


def picked(values_M: np.ndarray, mask_M: np.ndarray) -> np.ndarray:
    """Return what is under the mask; what is masked nowhere, as mostly, is not copied."""
    return values_M if mask_M.all() else values_M[mask_M]
