"""Policy losses of the core: PPO and importance sampling, maximum likelihood, DPO.

r is the ratio exp(logprobs - old_logprobs). A likelihood loss is the log-likelihood times a weight without a gradient.

Legend: see `batch`; P pairs. Sequences 2i and 2i+1 of a pack are the chosen and the rejected answer of pair i.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll_opd.objective.losses.batch import LossBatch, on_tokens, sequence_sums
from roll_opd.objective.registry import register_policy_loss


@register_policy_loss("importance_sampling")
def importance_sampling(batch: LossBatch) -> Tensor:
    """Return -A · r. Thinking Machines, "On-Policy Distillation" (2025)."""
    return -batch.advantages_M * batch.ratio_M * batch.mask_M


@register_policy_loss("ppo", reads_pg_clip=True)
def ppo(
    batch: LossBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    ratio_type: Literal["token", "sequence"] = "token",
) -> Tensor:
    """Return max(-A·r, -A·clip(r, 1-low, 1+high)). arXiv 1707.06347.

    Args:
        dual_clip: for A < 0, the loss is at most -A · dual_clip. arXiv 1912.09729.
        ratio_type: "token", or "sequence" to use the geometric mean of the sequence's ratios as r.
    """
    if ratio_type not in ("token", "sequence"):
        raise ValueError(f"ratio_type {ratio_type!r} of policy loss ppo is unknown; use token or sequence")
    ratio_M = batch.ratio_M if ratio_type == "token" else batch.sequence_ratio_M
    return clipped(ratio_M, batch, clip_low, clip_high, dual_clip)


def clipped(ratio_M: Tensor, batch: LossBatch, clip_low: float, clip_high: float, dual_clip: float | None) -> Tensor:
    """Return max(-A·r, -A·clip(r, 1-low, 1+high)) with the given ratios, limited by `dual_clip` as in `ppo`."""
    minus_M = -batch.advantages_M
    loss_M = torch.maximum(minus_M * ratio_M, minus_M * ratio_M.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss_M = torch.where(minus_M > 0, torch.minimum(loss_M, minus_M * dual_clip), loss_M)
    return loss_M * batch.mask_M


@register_policy_loss("sft", reads_advantages=False)
def sft(batch: LossBatch) -> Tensor:
    """Return -logprobs, the loss of maximum likelihood. Advantages and old log-probs are ignored."""
    return -batch.action_logprobs_M


@register_policy_loss("vanilla")
def vanilla(batch: LossBatch) -> Tensor:
    """Return -A · logprobs, the loss of REINFORCE. This is ROLL's pg_variant `vanilla`."""
    return -batch.advantages_M * batch.action_logprobs_M


@register_policy_loss("dpo", reads_advantages=False, needs="pairs", loss_agg_mode="seq-mean-token-mean")
def dpo(batch: LossBatch, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Return -(1-ε)·log σ(h) - ε·log σ(-h), h = β · [Σ_chosen (logprobs - ref) - Σ_rejected (logprobs - ref)].

    arXiv 2305.18290. Each action token of a pair gets the loss of the pair. Use this loss with seq-mean-token-mean: the
    token weights of each sequence then have the same sum. The weighted sum is therefore the mean over pairs, and does
    not depend on the lengths of the sequences.

    Args:
        beta: β.
        label_smoothing: ε.

    Raises:
        ValueError: if there are no log-probs of a reference policy, or if the number of sequences is odd.
    """
    if len(batch.lengths) % 2:
        raise ValueError(f"policy loss dpo needs pairs of sequences, but the pack has {len(batch.lengths)}")
    gap_M = torch.where(batch.mask_M, batch.logprobs_M - batch.needs("ref_logprobs_M", "dpo"), 0)
    gap_B = sequence_sums(gap_M, batch.lengths)
    margin_P = beta * (gap_B[0::2] - gap_B[1::2])
    loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    return on_tokens(loss_P.repeat_interleave(2), batch.lengths) * batch.mask_M
