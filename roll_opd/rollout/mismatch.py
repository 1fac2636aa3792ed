"""How far training and inference are apart, over a step's samples: measured whether or not it is corrected."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roll_opd.algorithms.corrections import Mismatch, mismatch_metrics
from roll_opd.data.experience import Experience


def mismatch_of(experiences: Sequence[Experience]) -> Mismatch:
    """The samples whose log-probs the training engine has computed, end to end; f64."""
    scored = [experience for experience in experiences if experience.old_logprobs is not None]
    return Mismatch(
        _joined([e.old_logprobs for e in scored], np.float64),
        _joined([e.rollout_logprobs for e in scored], np.float64),
        _joined([e.action_mask for e in scored], np.bool_),
        tuple(e.response_length for e in scored),
    )


def train_infer_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """`rollout/mismatch/*`, see `mismatch_metrics`."""
    return {f"rollout/mismatch/{name}": value for name, value in mismatch_metrics(mismatch_of(experiences)).items()}


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype))
