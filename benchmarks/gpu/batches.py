"""What both sides of the comparison read: random sequences, and the objectives that they are compared in."""

from collections.abc import Sequence
from typing import Any

import numpy as np

PROMPT = 5  # tokens of each sequence that are not scored
TOPK = 8
TEMPERATURE = 0.8
COEFFICIENT = 0.7  # of the teacher
# name -> the divergence that an objective takes; `sampled` has none
OBJECTIVES = {
    "sampled": None,
    "topk": "reverse_kl",
    "full": "reverse_kl",
    "full forward_kl": "forward_kl",
    "full jsd": "jsd",
    "full skewed_reverse_kl": "skewed_reverse_kl",
    "full skewed_forward_kl": "skewed_forward_kl",
}
BETA, ALPHA = 0.5, 0.1  # of jsd, of the skewed ones


def sequences(vocab: int, number: int, length: int, seed: int = 0) -> list[np.ndarray]:
    """Return random tokens, int64, `number` times; lengths from half of `length` to all of it."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, int(rng.integers(length // 2, length + 1))) for _ in range(number)]


def samples(tokens: Sequence[np.ndarray], reference: Any, objective: str) -> list[Any]:
    """Return the train samples of an objective, with the teacher's side as `reference` has it."""
    from roll_opd.samples.training import TeacherTargets, TrainSample

    found = []
    for number, whole in enumerate(tokens):
        scored = len(whole) - PROMPT
        zeros, mask = np.zeros(scored, np.float32), np.ones(scored, bool)
        if objective == "sampled":
            share = np.full(scored, COEFFICIENT, np.float32)
            found.append(TrainSample(whole, PROMPT, mask, zeros, share, share * reference[f"teacher {number}"], None))
            continue
        names = {"topk": ("topk_ids", "topk_logprobs", "topk_rest"), "full": ("hidden",)}[objective.split()[0]]
        arrays = {name: reference[f"{name} {number}"] for name in names}
        targets = {"teacher": TeacherTargets(COEFFICIENT, arrays)}
        found.append(TrainSample(whole, PROMPT, mask, zeros, zeros, zeros, None, teachers=targets))
    return found
