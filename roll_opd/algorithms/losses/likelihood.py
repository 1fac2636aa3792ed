"""Losses that are a weight, without gradient, times the log-likelihood. Legend: see `batch`."""

import torch
from torch import Tensor

from roll_opd.algorithms.losses.batch import LossBatch
from roll_opd.algorithms.registry import register_policy_loss


@register_policy_loss("sft", reads_advantages=False)
def sft(batch: LossBatch) -> Tensor:
    """-logprobs: maximum likelihood. Neither advantages nor old log-probs are read."""
    return -batch.action_logprobs_M


@register_policy_loss("vanilla")
def vanilla(batch: LossBatch) -> Tensor:
    """-A · logprobs: REINFORCE; ROLL's pg_variant `vanilla`."""
    return -batch.advantages_M * batch.action_logprobs_M


@register_policy_loss("opmd")
def opmd(batch: LossBatch, *, tau: float = 1.0) -> Tensor:
    """-A · logprobs / (1+τ). Trinity-RFT, arXiv 2505.17826."""
    return vanilla(batch) / (1 + tau)


@register_policy_loss("tis")
def tis(batch: LossBatch, *, lower_bound: float = 0.0, upper_bound: float = 1.0) -> Tensor:
    """-A · sg(clip(r, lower, upper)) · logprobs: truncated importance sampling, ROLL's pg_variant `tis`."""
    return vanilla(batch) * batch.ratio_M.detach().clamp(lower_bound, upper_bound)


@register_policy_loss("topr")
def topr(batch: LossBatch, *, positive_weight: float = 1.0, negative_weight: float = 1.0) -> Tensor:
    """-sg(α) · R · logprobs, α = clip(r, 0, 1) where R <= 0, else 1. arXiv 2503.14286.

    R is the advantage. Where the batch has rewards, they say which samples are the positive ones (as in ROLL, whose
    advantages may have a baseline and the samples another sign than before).
    """
    sign_M = batch.advantages_M if batch.rewards_M is None else batch.rewards_M
    tapered_M = negative_weight * batch.ratio_M.detach().clamp(0, 1)
    return vanilla(batch) * torch.where(sign_M <= 0, tapered_M, positive_weight)


@register_policy_loss("kimi15")
def kimi15(batch: LossBatch, *, tau: float = 0.1) -> Tensor:
    """-A · logprobs + τ/2 · (logprobs - old_logprobs)². Kimi k1.5, arXiv 2501.12599."""
    return vanilla(batch) + tau / 2 * batch.log_ratio_M.square()
