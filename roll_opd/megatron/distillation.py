"""The distillation objectives with a live gradient: a divergence at every token, over a top-k or the whole vocabulary.

Legend: M scored tokens of a pack, R of them that a teacher has targets for, K tokens of a top-k and L = K + 1, F a
teacher's hidden size.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from roll_opd.algorithms.divergences import ColumnSum, divergence, topk_divergence
from roll_opd.config.plan import ObjectivePlan
from roll_opd.megatron.batches import PackedBatch
from roll_opd.megatron.head import OutputHead, TeacherHead
from roll_opd.samples.training import TrainSample


def teacher_columns(samples: Sequence[TrainSample]) -> list[dict[str, np.ndarray]]:
    """Return, for each sample, the targets of every teacher of the batch: `name/share` f32 [T-P], and its arrays.

    A share is the teacher's coefficient on the action tokens of the samples that it has targets for, else 0.
    """
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


def distillation_loss(
    head: OutputHead, batch: PackedBatch, objective: ObjectivePlan, heads: Mapping[str, TeacherHead]
) -> Tensor:
    """Return Σ over tokens and teachers of weight · coefficient · divergence, this rank's part of the loss. Collective.

    Args:
        heads: the output heads of the teachers, where the objective is `full`.
    """
    measure = divergence(objective.opd_divergence, beta=objective.opd_jsd_beta, alpha=objective.opd_skew_alpha)
    total, head = torch.zeros((), device=head.device), head.within(objective.opd_vocab_size)
    for name in (column.removesuffix("/share") for column in batch.columns if column.endswith("/share")):
        share_M = batch.columns[f"{name}/share"] * batch.columns["weight"]
        rows_R = share_M.nonzero()[:, 0]
        targets = {key: batch.columns[f"{name}/{key}"][rows_R] for key in _TARGET_ARRAYS[objective.opd_objective]}
        divergence_R = _DIVERGENCE_OVER[objective.opd_objective](head.at(rows_R), measure, heads.get(name), **targets)
        total = total + (share_M[rows_R] * divergence_R).sum()
    return total


def _over_topk(
    head: OutputHead,
    measure: ColumnSum,
    teacher: TeacherHead | None,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    topk_rest: Tensor,
) -> Tensor:
    teacher_RL = torch.cat([topk_logprobs, topk_rest[:, None]], dim=1)
    return topk_divergence(head.logprobs_with_rest(topk_ids.long()), teacher_RL, measure)


def _over_vocabulary(head: OutputHead, measure: ColumnSum, teacher: TeacherHead, hidden: Tensor) -> Tensor:
    return head.divergence(hidden, teacher, measure)


_TARGET_ARRAYS = {"topk": ("topk_ids", "topk_logprobs", "topk_rest"), "full": ("hidden",)}  # see `TeacherTargets`
_DIVERGENCE_OVER: dict[str, Callable[..., Tensor]] = {"topk": _over_topk, "full": _over_vocabulary}
