"""Columns of samples are set for a whole batch, and removed."""

import numpy as np
import pytest

from roll_opd.objective.demonstrations import supervised_samples
from roll_opd.samples.sample import with_columns


def test_a_batch_is_filled_by_column_and_a_column_is_removed_by_none() -> None:
    samples = supervised_samples([(np.arange(3), (np.arange(2), np.arange(4)))])
    old = [np.zeros(2, np.float32), np.zeros(4, np.float32)]
    filled = with_columns(samples, old_logprobs=old, rollout_logprobs=old)
    assert [one.old_logprobs is values for one, values in zip(filled, old, strict=True)] == [True, True]
    assert all(one.old_logprobs is None for one in samples)  # the samples given are unchanged
    removed = filled[0].with_columns(old_logprobs=None)
    assert removed.columns.keys() == {"action_mask", "rollout_logprobs"}
    with pytest.raises(ValueError, match="zip"):
        with_columns(samples, old_logprobs=old[:1])
