"""The rewards of this project. `worker_cls: my_rewards.last_number` in distill.yaml names a function of this file."""

import re
from collections.abc import Sequence

from roll_opd.rewards.interface import RewardSample


def last_number(samples: Sequence[RewardSample]) -> list[float]:
    """Return 1 for each response whose last number is the `ground_truth` of its row, else 0."""
    return [float(re.findall(r"-?\d+", sample.response)[-1:] == [sample.ground_truth]) for sample in samples]
