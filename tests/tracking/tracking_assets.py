"""Measurements that several tests of this directory share."""

import numpy as np

from roll_opd.samples.sample import Sample, as_columns, teacher_columns


def experience(number: int) -> Sample:
    length = 3 + number
    logprobs = -np.linspace(0.1, 1.0, length, dtype=np.float32)
    return Sample(
        id=str(number),
        group_id=f"g{number // 4}",
        tag=("math", "code")[number // 4],
        domain="d",
        tokens=np.arange(2 + length),
        prompt_length=2,
        finish_reason="stop",
        reward=float(number % 2),
        columns=as_columns(
            action_mask=np.ones(length, dtype=bool),
            rollout_logprobs=logprobs,
            old_logprobs=logprobs - 0.01,
            **teacher_columns({"one": logprobs, "two": logprobs * 2}),
        ),
    )
