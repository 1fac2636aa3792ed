"""Validation loss on held-out rows, with the training loss."""

from collections.abc import Sequence

import numpy as np
import torch

from roll_opd.algorithms.aggregation import token_weights
from roll_opd.algorithms.losses.batch import LossBatch
from roll_opd.algorithms.registry import policy_loss
from roll_opd.config.plan import ObjectivePlan
from roll_opd.samples.experience import Experience


def supervised_loss(samples: Sequence[Experience], logprobs: Sequence[np.ndarray], objective: ObjectivePlan) -> float:
    """Return the loss of `samples`, whose answers have `logprobs` (f32 [T-P] each)."""
    masks = [torch.from_numpy(sample.action_mask) for sample in samples]
    weights = token_weights(masks, objective.loss_agg_mode, objective.loss_normaliser)
    logprobs_M = torch.from_numpy(np.concatenate(logprobs)).double()
    ref = [sample.ref_logprobs for sample in samples if sample.ref_logprobs is not None]
    batch = LossBatch(
        logprobs_M,
        logprobs_M,
        torch.zeros_like(logprobs_M),
        torch.cat(masks),
        tuple(len(mask) for mask in masks),
        ref_logprobs_M=torch.from_numpy(np.concatenate(ref)).double() if ref else None,
    )
    arguments = objective.policy_loss_args
    loss_M = policy_loss(objective.policy_loss, arguments)(batch, **arguments)
    return float((loss_M * torch.cat(weights)).sum())
