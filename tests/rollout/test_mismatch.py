"""The mismatch of a step is that of its action tokens, of the samples that the training engine has scored."""

import math

import numpy as np
import pytest

from roll_opd.data.experience import Experience
from roll_opd.rollout.mismatch import train_infer_metrics


def experience(rollout: list[float], train: list[float] | None, mask: list[bool]) -> Experience:
    return Experience(
        id="a",
        group_id="a",
        tag="t",
        domain="d",
        tokens=np.arange(2 + len(mask)),
        prompt_length=2,
        action_mask=np.array(mask),
        rollout_logprobs=np.array(rollout, np.float32),
        finish_reason="stop",
        weights_version=0,
        old_logprobs=None if train is None else np.array(train, np.float32),
    )


def test_over_the_samples_of_a_step() -> None:
    batch = [
        experience([-1.0, -9.0, -2.0], [-1.5, -math.inf, -2.0], [True, False, True]),
        experience([-1.0], None, [True]),
        experience([-3.0], [-2.75], [True]),
    ]
    metrics = train_infer_metrics(batch)
    gaps = [-0.5, 0.0, 0.25]
    assert metrics["rollout/mismatch/logprob_diff_mean"] == pytest.approx(0.25)
    assert metrics["rollout/mismatch/k1"] == pytest.approx(-sum(gaps) / 3)
    assert metrics["rollout/mismatch/ratio_max"] == pytest.approx(math.exp(0.25))
    assert train_infer_metrics([batch[1]]) == train_infer_metrics([]) == {}
