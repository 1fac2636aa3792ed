"""Sampling settings of single calls, which a workflow may change: a column of the samples.

A sample has the column only if a call sampled a part of it with other settings than the run's. Legend: T tokens, P
prompt tokens.
"""

from collections.abc import Collection

import numpy as np

from roll_opd.config.schema import SamplingKeys
from roll_opd.samples.sample import Sample

CALL_SETTINGS = "call_settings"  # column: the fields of `FIELDS`, NaN where a call has the run's; f32 [T-P, 4]
FIELDS = ("temperature", "top_k", "top_p", "repetition_penalty")
OF_RUN = np.full(len(FIELDS), np.nan, np.float32)
UNKNOWN = np.zeros(len(FIELDS), np.float32)  # which of a run's calls sampled the token is not known


def settings_row(sampling: SamplingKeys) -> np.ndarray:
    """Return the row of the column for tokens that are sampled with `sampling`."""
    return np.array([getattr(sampling, name) for name in FIELDS], np.float32)


def call_row(sampling: SamplingKeys, of_run: SamplingKeys) -> np.ndarray:
    """Return the row for the tokens of a call that samples with `sampling`, f32 [4]."""
    row = settings_row(sampling)
    return np.where(row == settings_row(of_run), OF_RUN, row)


def settings_column(given: np.ndarray | None, used: Collection[bytes], length: int) -> np.ndarray | None:
    """Return the column of a response, or None if all its tokens were sampled with the run's settings.

    Args:
        given: rows of the response's tokens, if the workflow has returned them. A workflow that makes experiences from
            tokens returns none.
        used: bytes of the rows of all calls of the response's run.
        length: number of tokens of the response.
    """
    if given is None or len(given) != length:
        rows = [np.frombuffer(row, np.float32) for row in used]
        row = rows[0] if len(rows) == 1 else UNKNOWN if rows else OF_RUN
        given = np.broadcast_to(row, (length, len(FIELDS)))
    return None if np.isnan(given).all() else np.array(given)


def with_call_settings(sample: Sample, row: np.ndarray) -> Sample:
    """Return the sample with `row` in place of the run's settings."""
    given = sample.columns.get(CALL_SETTINGS, np.broadcast_to(OF_RUN, (sample.response_length, len(FIELDS))))
    return sample.with_columns(**{CALL_SETTINGS: np.where(np.isnan(given), row, given)})
