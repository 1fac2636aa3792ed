"""Make samples from rows with answers. They are used for SFT, for DPO, and as demonstrations in a step of the student.

The student does not sample these answers. Demonstrations have neither rewards nor log-probs of teachers or reference.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from roll_opd.data.dataset import Prompt
from roll_opd.samples.sample import Sample


def supervised_samples(rows: Iterable[tuple[np.ndarray, tuple[np.ndarray, ...]]]) -> list[Sample]:
    """Return a sample for each answer in `rows`.

    Each row has the tokens of a prompt and of its answers. All tokens of an answer are in the loss.
    """
    return [
        _answered(prompt, answer, id=f"{row}/{number}", group_id=str(row))
        for row, (prompt, answers) in enumerate(rows)
        for number, answer in enumerate(answers)
    ]


def demonstration_samples(rows: Sequence[Prompt], first_draw: int) -> list[Sample]:
    """Return a sample for each row.

    The ids of the samples contain consecutive numbers. The first is `first_draw`, the number of rows drawn before.
    """
    return [_demonstration(row, f"{row.id}#demonstration{draw}") for draw, row in enumerate(rows, first_draw)]


def _demonstration(row: Prompt, name: str) -> Sample:
    (answer,) = row.answers
    facts = {"tag": row.tag, "demonstration": True, "ground_truth": row.ground_truth}
    return _answered(row.tokens, answer, id=name, group_id=name, **facts)


def _answered(prompt: np.ndarray, answer: np.ndarray, **fields: Any) -> Sample:
    columns = {"action_mask": np.ones(len(answer), dtype=bool)}
    return Sample(np.concatenate([prompt, answer]), len(prompt), columns, **fields)


def mixed(sampled: Sequence[Sample], demonstrations: Sequence[Sample], updates: int) -> list[Sample]:
    """Return student samples and demonstrations in one list.

    The list consists of `updates` mini-batches. Each mini-batch has the same number of student samples and the same
    number of demonstrations.
    """
    both: list[Sample] = []
    for update in range(updates):
        for samples in (sampled, demonstrations):
            size = len(samples) // updates
            both += samples[update * size : (update + 1) * size]
    return both
