"""Results of an update, and references to teacher targets: plain numpy, importable without an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

ROUTER_LOSSES = ("z_loss", "load_balancing_loss")  # of mixtures of experts, in the sums of a `TrainResult`


@dataclass
class TargetRef:
    """Reference to a teacher's targets of one sample, kept in the object store of the rank that computed them.

    The arrays are, for top-k, `topk_ids` int32 [T-P, K], `topk_logprobs` f32 [T-P, K] and `topk_rest` f32 [T-P], the
    log-prob of all other tokens together; for the whole vocabulary the final hidden states `hidden` [T-P, F] (see
    `samples.tensors`), for the teacher's output head on the student's ranks.
    """

    bundle: Any  # a reference to some samples' arrays; None: they are released
    place: int  # in the bundle
    columns: Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype and shape of a token's part
    hits: np.ndarray | None = None  # bool [T-P], which sampled tokens are in the top-k; for records

    def for_ranks(self) -> "TargetRef":
        """Return the reference without the record of hits, for the ranks that open it."""
        return replace(self, hits=None)

    def released(self) -> None:
        """Drop the reference to the arrays."""
        self.bundle = None


@dataclass(frozen=True)
class TrainResult:
    """One rank's share of an update: sums over its tokens, and the log-probs it computed on the way."""

    sums: dict[str, float]  # name -> Σ over this rank's action tokens; see `update` of the trainer and the critic
    logprobs: dict[int, np.ndarray]  # sample number -> f32 [T-P], before the update
    grad_norm: float
    learning_rate: float
    applied: bool  # False: a loss or gradient was not finite and the weights were left alone
