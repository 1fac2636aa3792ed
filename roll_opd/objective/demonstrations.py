"""Demonstrations as experiences, and their place among the student's samples of a step.

They are not sampled, and have neither rewards nor log-probs by frozen models: the loss reads their tokens alone.
"""

from collections.abc import Sequence

import numpy as np

from roll_opd.data.dataset import Prompt
from roll_opd.samples.experience import Experience


def demonstration_experiences(rows: Sequence[Prompt], first_draw: int) -> list[Experience]:
    """Return one experience a row; `first_draw` rows were drawn before in the run, which makes the ids unique."""
    return [_experience_of(row, first_draw + position) for position, row in enumerate(rows)]


def _experience_of(row: Prompt, draw: int) -> Experience:
    (answer,) = row.answers
    name = f"{row.id}#demonstration{draw}"
    return Experience(
        id=name,
        group_id=name,
        tag=row.tag,
        domain="",
        tokens=np.concatenate([row.tokens, answer]),
        prompt_length=len(row.tokens),
        action_mask=np.ones(len(answer), dtype=bool),
        rollout_logprobs=None,
        finish_reason="stop",
        demonstration=True,
        ground_truth=row.ground_truth,
    )


def mixed(sampled: Sequence[Experience], demonstrations: Sequence[Experience], updates: int) -> list[Experience]:
    """Return both in one list whose `updates` equal parts, one after another, have equal shares of each."""
    both: list[Experience] = []
    for update in range(updates):
        for samples in (sampled, demonstrations):
            size = len(samples) // updates
            both += samples[update * size : (update + 1) * size]
    return both
