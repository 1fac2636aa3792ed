"""What several tests of this room measure."""

import numpy as np

from roll_opd.samples.experience import Experience


def experience(number: int) -> Experience:
    length = 3 + number
    logprobs = -np.linspace(0.1, 1.0, length, dtype=np.float32)
    return Experience(
        id=str(number),
        group_id=f"g{number // 4}",
        tag=("math", "code")[number // 4],
        domain="d",
        tokens=np.arange(2 + length),
        prompt_length=2,
        action_mask=np.ones(length, dtype=bool),
        rollout_logprobs=logprobs,
        finish_reason="stop",
        old_logprobs=logprobs - 0.01,
        teacher_logprobs={"one": logprobs, "two": logprobs * 2},
        reward=float(number % 2),
    )
