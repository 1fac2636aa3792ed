"""What goes into a train step and what comes out: plain numpy, so that the driver need not import an engine."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TrainSample:
    """One sequence to learn from: T tokens, P of them prompt; every array [T-P]."""

    tokens: np.ndarray  # int64 [T]
    prompt_length: int
    action_mask: np.ndarray  # bool
    advantages: np.ndarray  # f32, of the external reward (0 in pure distillation)
    opd_coefficients: np.ndarray  # f32, see algorithms.opd
    opd_teacher: np.ndarray  # f32
    old_logprobs: np.ndarray | None  # f32; None: the weights being trained are still those that sampled
    ref_logprobs: np.ndarray | None = None  # f32, of the frozen reference policy; None: there is no KL loss
    reward: float | None = None  # the external reward; None: there is none


def answered_samples(rows: Iterable[tuple[np.ndarray, tuple[np.ndarray, ...]]]) -> list[TrainSample]:
    """Samples of (prompt, answers) in tokens: one an answer, every token of which is learned from."""
    samples = []
    for prompt, answers in rows:
        for answer in answers:
            zeros = np.zeros(len(answer), np.float32)
            mask = np.ones(len(answer), dtype=bool)
            whole = np.concatenate([prompt, answer])
            samples.append(TrainSample(whole, len(prompt), mask, zeros, zeros, zeros, old_logprobs=None))
    return samples


@dataclass(frozen=True)
class TrainResult:
    """One rank's share of an update: sums over its tokens, and the log-probs it computed on the way."""

    sums: dict[str, float]  # name -> Σ over this rank's action tokens; see `MegatronTrainer.update`
    logprobs: dict[int, np.ndarray]  # sample number -> f32 [T-P], before the update
    grad_norm: float
    learning_rate: float
    applied: bool  # False: a loss or gradient was not finite and the weights were left alone
