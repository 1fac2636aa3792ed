"""The columns of a sample: arrays over its response.

Entry t of every column belongs to token `tokens[P+t]`. A stage sets a column of a whole batch with
`samples.sample.with_columns`. The samples in a rank's shard have only the columns of `objective.columns` and the
teachers' targets (`TargetRef`).

Legend: T tokens of a sample, P prompt tokens, M tokens of a batch, concatenated.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

_LOGPROBS = "/logprobs"
CHUNKS = "/chunks"  # suffix of the columns that hold chunks


def as_columns(**arrays: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return a map from column names to arrays. Arrays that are None are left out."""
    return {name: array for name, array in arrays.items() if array is not None}


def logprobs_column(teacher: str) -> str:
    """Return the name of the column that holds a teacher's log-probs."""
    return teacher + _LOGPROBS


def teacher_columns(logprobs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the log-prob columns of teachers: a map from column names to arrays.

    Args:
        logprobs: map from teacher names to log-probs.
    """
    return {logprobs_column(name): array for name, array in logprobs.items()}


def chunks_column(teacher: str) -> str:
    """Return the name of the column that holds the chunks of a teacher with another tokenizer."""
    return teacher + CHUNKS


def teacher_logprobs(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a map from teacher names to log-probs, taken from the columns `TEACHER/logprobs` in their order."""
    return {name.removesuffix(_LOGPROBS): array for name, array in columns.items() if name.endswith(_LOGPROBS)}


def end_to_end(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Return the concatenation [M] of the samples' arrays [T-P]. The result is empty if there are no samples."""
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def split_by_length(values_M: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return each sample's part of a concatenated array [M], as views [T-P]."""
    ends = itertools.accumulate(lengths)
    return [values_M[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def picked(values_M: np.ndarray, mask_M: np.ndarray) -> np.ndarray:
    """Return the values at which the mask is true. If the mask is true everywhere, the values are not copied."""
    return values_M if mask_M.all() else values_M[mask_M]
