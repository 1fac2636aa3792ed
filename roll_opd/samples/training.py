"""What goes into a train step and what comes out: plain numpy, so that the driver need not import an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROUTER_LOSSES = ("z_loss", "load_balancing_loss")  # of mixtures of experts, in the sums of a `TrainResult`


@dataclass(frozen=True)
class TeacherTargets:
    """A teacher's distribution at each of T-P tokens, for objectives whose gradient passes through more than one token.

    `arrays` holds, for top-k, `topk_ids` int32 [T-P, K], `topk_logprobs` f32 [T-P, K] and `topk_rest` f32 [T-P], the
    log-prob of all other tokens together; for the full vocabulary the final hidden states `hidden` [T-P, F] (see
    `samples.tensors`), for the teacher's output head on the student's ranks.
    """

    coefficient: float  # opd_kl_coef
    arrays: Mapping[str, np.ndarray]


@dataclass
class TargetRef:
    """`TeacherTargets.arrays` of one sample, which stay where they were computed until a rank opens them."""

    bundle: Any  # a reference to some samples' arrays; None: they are released
    place: int  # in the bundle
    columns: Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype and shape of a token's part
    hits: np.ndarray | None = None  # bool [T-P], which sampled tokens are in the top-k; for records

    def released(self) -> None:
        """Let go of the arrays, for whoever holds this."""
        self.bundle = None


@dataclass(frozen=True)
class TrainSample:
    """One sequence to learn from: T tokens, P of them prompt; every array [T-P]."""

    tokens: np.ndarray  # int64 [T]
    prompt_length: int
    action_mask: np.ndarray  # bool, tokens to learn from
    advantages: np.ndarray  # f32, of the external reward (0 in pure distillation)
    opd_coefficients: np.ndarray  # f32, see algorithms.opd
    opd_teacher: np.ndarray  # f32
    old_logprobs: np.ndarray | None  # f32; None: the weights being trained are still those that sampled
    ref_logprobs: np.ndarray | None = None  # f32, of the frozen reference policy; None: there is no KL loss
    importance_weights: np.ndarray | None = None  # f32, of the policy loss, without a gradient; None: 1
    reward: float | None = None  # the external reward; None: there is none
    teachers: Mapping[str, TeacherTargets] = field(default_factory=dict)  # none where the objective is `sampled`
    demonstration: bool = False  # a row with its answer; no advantages, reward or old log-probs
    actions: np.ndarray | None = None  # bool, all action tokens, which opd_kl_discount counts; None: action_mask
    routes: np.ndarray | None = None  # integer [T-1, layers, K], the K experts of each token; None: the model's own


@dataclass(frozen=True)
class ValueSample:
    """One sequence for a critic to learn from: T tokens, P of them prompt; every array [T-P]."""

    tokens: np.ndarray  # int64 [T]
    prompt_length: int
    action_mask: np.ndarray  # bool
    old_values: np.ndarray  # f32, before the step's updates
    returns: np.ndarray  # f32, what the values are to become


@dataclass(frozen=True)
class TrainResult:
    """One rank's share of an update: sums over its tokens, and the log-probs it computed on the way."""

    sums: dict[
        str, float
    ]  # name -> Σ over this rank's action tokens; see `MegatronTrainer.update`, `MegatronCritic.update`
    logprobs: dict[int, np.ndarray]  # sample number -> f32 [T-P], before the update
    grad_norm: float
    learning_rate: float
    applied: bool  # False: a loss or gradient was not finite and the weights were left alone
