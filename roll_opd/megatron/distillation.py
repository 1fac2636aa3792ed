"""The distillation objectives with a live gradient: a divergence at every token, over a top-k or the whole vocabulary.

Legend: M scored tokens of a pack, R of them that a teacher has targets for, K tokens of a top-k and L = K + 1, F a
teacher's hidden size.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from roll_opd.algorithms.divergences import ColumnSum, divergence, topk_divergence
from roll_opd.config.plan import ObjectivePlan
from roll_opd.megatron.batches import PackedBatch
from roll_opd.megatron.head import OutputHead, TeacherHead


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


_TARGET_ARRAYS = {"topk": ("topk_ids", "topk_logprobs", "topk_rest"), "full": ("hidden",)}  # see `samples.sample`
_DIVERGENCE_OVER: dict[str, Callable[..., Tensor]] = {"topk": _over_topk, "full": _over_vocabulary}
