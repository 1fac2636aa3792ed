"""Training samples for the references of the tests, and their columns for the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.aggregation import loss_scales, scaled, value_scales
from roll_opd.samples.micro_batches import TrainResult
from roll_opd.samples.sample import Sample


@dataclass(frozen=True)
class TeacherTargets:
    """A teacher's distribution at each of T-P tokens, for objectives whose gradient passes through more than one token.

    `arrays` holds, for top-k, `topk_ids` int32 [T-P, K], `topk_logprobs` f32 [T-P, K] and `topk_rest` f32 [T-P], the
    log-prob of all other tokens together; for the full vocabulary the final hidden states `hidden` [T-P, F] (see
    `samples.transport`), for the teacher's output head on the student's ranks.
    """

    coefficient: float  # opd_kl_coef
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TrainSample:
    """A sequence to train on: T tokens, P of them prompt; every array is [T-P]."""

    tokens: np.ndarray  # int64 [T]
    prompt_length: int
    action_mask: np.ndarray  # bool, tokens to learn from
    advantages: np.ndarray  # f32, of the external reward (0 in pure distillation)
    opd_coefficients: np.ndarray  # f32, see objective.opd_loss
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
    """A sequence to train a critic on: T tokens, P of them prompt; every array is [T-P]."""

    tokens: np.ndarray  # int64 [T]
    prompt_length: int
    action_mask: np.ndarray  # bool
    old_values: np.ndarray  # f32, before the step's updates
    returns: np.ndarray  # f32, what the values are to become


def columns_of(samples: Sequence[TrainSample], objective: ObjectivePlan) -> list[Sample]:
    """Return the whole mini-batch with the columns of the loss, computed independently of `objective.columns`."""
    masks = [torch.from_numpy(sample.action_mask) for sample in samples]
    demonstrations = [sample.demonstration for sample in samples]
    weights = scaled(masks, loss_scales([int(mask.sum()) for mask in masks], demonstrations, objective))
    optional = [_optional(sample) for sample in samples]
    names = {name for arrays in optional for name in arrays}
    result = []
    for sample, weight, arrays, targets in zip(samples, weights, optional, _targets(samples), strict=True):
        columns = {
            "mask": sample.action_mask,
            "weight": weight.numpy(),
            "advantages": sample.advantages,
            "opd_coefficients": sample.opd_coefficients,
            "opd_teacher": sample.opd_teacher,
        }
        if objective.opd_kl_discount:
            columns["actions"] = sample.action_mask if sample.actions is None else sample.actions
        if any(demonstrations):
            columns["demonstration"] = np.full(len(sample.action_mask), sample.demonstration)
        if sample.demonstration:
            columns |= {n: np.full(len(sample.action_mask), n == "importance_weights", np.float32) for n in names}
        result.append(Sample(sample.tokens, sample.prompt_length, columns | arrays | targets, sample.routes))
    return result


def updated(trainer: Any, samples: Sequence[TrainSample], objective: ObjectivePlan, *arguments: Any) -> TrainResult:
    """Run one update of a `MegatronTrainer` on a whole mini-batch."""
    return trainer.update(columns_of(samples, objective), objective, *arguments)


def value_columns_of(samples: Sequence[ValueSample]) -> list[Sample]:
    """Return the whole mini-batch of a critic with the columns of the value loss."""
    masks = [torch.from_numpy(sample.action_mask) for sample in samples]
    weights = scaled(masks, value_scales([int(mask.sum()) for mask in masks]))
    return [
        Sample(
            sample.tokens,
            sample.prompt_length,
            {
                "mask": sample.action_mask,
                "weight": weight.numpy(),
                "old_values": sample.old_values,
                "returns": sample.returns,
            },
        )
        for sample, weight in zip(samples, weights, strict=True)
    ]


def _optional(sample: TrainSample) -> dict[str, np.ndarray]:
    reward = None if sample.reward is None else np.full(len(sample.action_mask), sample.reward, np.float32)
    arrays = {"old_logprobs": sample.old_logprobs, "ref_logprobs": sample.ref_logprobs, "rewards": reward}
    arrays["importance_weights"] = sample.importance_weights
    return {name: array for name, array in arrays.items() if array is not None}


def _targets(samples: Sequence[TrainSample]) -> list[dict[str, np.ndarray]]:
    teachers = {name: targets for sample in samples for name, targets in sample.teachers.items()}
    result = []
    for sample in samples:
        mask = sample.action_mask
        columns: dict[str, np.ndarray] = {}
        for name, of_another in teachers.items():
            targets = sample.teachers.get(name)
            columns[f"{name}/share"] = mask * np.float32(targets.coefficient if targets else 0)
            for key, like in of_another.arrays.items():
                empty = np.broadcast_to(np.zeros((), like.dtype), (len(mask), *like.shape[1:]))
                columns[f"{name}/{key}"] = targets.arrays[key] if targets else empty
        result.append(columns)
    return result
