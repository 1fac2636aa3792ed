"""Inputs of both sides of the comparison: random sequences, and the compared objectives."""

from collections.abc import Sequence
from typing import Any

import numpy as np

PROMPT = 5  # tokens of each sequence that are not scored
TOPK = 8
TEMPERATURE = 0.8
COEFFICIENT = 0.7  # of the teacher
# name of an objective -> its divergence; `sampled` has none
OBJECTIVES = {
    "sampled": None,
    "topk": "reverse_kl",
    "full": "reverse_kl",
    "full forward_kl": "forward_kl",
    "full jsd": "jsd",
    "full skewed_reverse_kl": "skewed_reverse_kl",
    "full skewed_forward_kl": "skewed_forward_kl",
}
BETA, ALPHA = 0.5, 0.1  # parameters of jsd and of the skewed divergences


def sequences(vocab: int, number: int, length: int, seed: int = 0) -> list[np.ndarray]:
    """Return `number` random sequences, int64, with lengths from `length` / 2 to `length`."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, int(rng.integers(length // 2, length + 1))) for _ in range(number)]


def samples(tokens: Sequence[np.ndarray], reference: Any, objective: str) -> list[Any]:
    """Return the samples of an update, with the teacher's columns from `reference`."""
    from roll_opd.samples.sample import Sample

    found = []
    scored = [len(whole) - PROMPT for whole in tokens]
    for number, (whole, length) in enumerate(zip(tokens, scored, strict=True)):
        zeros, share = np.zeros(length, np.float32), np.full(length, COEFFICIENT, np.float32)
        columns = {
            "mask": np.ones(length, bool),
            "weight": np.full(length, 1 / sum(scored), np.float32),
            "advantages": zeros,
            "opd_coefficients": zeros,
            "opd_teacher": zeros,
        }
        if objective == "sampled":
            columns |= {"opd_coefficients": share, "opd_teacher": share * reference[f"teacher {number}"]}
        else:
            names = {"topk": ("topk_ids", "topk_logprobs", "topk_rest"), "full": ("hidden",)}[objective.split()[0]]
            columns["teacher/share"] = share
            columns |= {f"teacher/{name}": reference[f"{name} {number}"] for name in names}
        found.append(Sample(whole, PROMPT, columns))
    return found
