"""Likelihood losses and preference losses.

A likelihood loss is the log-likelihood times a weight without a gradient.

Legend: see `batch`; P pairs. Sequences 2i and 2i+1 of a pack are the chosen and the rejected answer of pair i.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll_opd.objective.losses.batch import LossBatch, on_tokens, sequence_sums
from roll_opd.objective.registry import register_policy_loss


@register_policy_loss("sft", reads_advantages=False)
def sft(batch: LossBatch) -> Tensor:
    """Return -logprobs, the loss of maximum likelihood. Advantages and old log-probs are ignored."""
    return -batch.action_logprobs_M


@register_policy_loss("vanilla")
def vanilla(batch: LossBatch) -> Tensor:
    """Return -A · logprobs, the loss of REINFORCE. This is ROLL's pg_variant `vanilla`."""
    return -batch.advantages_M * batch.action_logprobs_M


@register_policy_loss("opmd")
def opmd(batch: LossBatch, *, tau: float = 1.0) -> Tensor:
    """Return -A · logprobs / (1+τ). Trinity-RFT, arXiv 2505.17826."""
    return vanilla(batch) / (1 + tau)


@register_policy_loss("tis")
def tis(batch: LossBatch, *, lower_bound: float = 0.0, upper_bound: float = 1.0) -> Tensor:
    """Return -A · sg(clip(r, lower, upper)) · logprobs, the loss of truncated importance sampling.

    This is ROLL's pg_variant `tis`.
    """
    return vanilla(batch) * batch.ratio_M.detach().clamp(lower_bound, upper_bound)


@register_policy_loss("topr")
def topr(
    batch: LossBatch,
    *,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
    advantage_threshold: float = 0.0,
    sign_of: Literal["advantage", "reward"] = "advantage",
) -> Tensor:
    """Return -sg(α) · A · logprobs. arXiv 2503.14286, Trinity-RFT.

    α is `positive_weight` if A > `advantage_threshold`, and `negative_weight` · clip(r, 0, 1) otherwise.

    Args:
        sign_of: "advantage", or "reward" to compare the reward with the threshold instead of A. ROLL compares the
            reward, because a baseline may change the sign of advantages. If the batch has no rewards, A is compared.
    """
    if sign_of not in ("advantage", "reward"):
        raise ValueError(f"sign_of {sign_of!r} of policy loss topr is unknown; use advantage or reward")
    negative_M = is_negative(batch, advantage_threshold, sign_of)
    tapered_M = negative_weight * batch.ratio_M.detach().clamp(0, 1)
    return vanilla(batch) * torch.where(negative_M, tapered_M, positive_weight)


def is_negative(batch: LossBatch, threshold: float, sign_of: str) -> Tensor:
    """Return a mask of the tokens to which `topr` applies the clipped ratio, bool [M]."""
    sign_M = batch.advantages_M if sign_of == "advantage" or batch.rewards_M is None else batch.rewards_M
    return sign_M <= threshold


@register_policy_loss("kimi15")
def kimi15(batch: LossBatch, *, tau: float = 0.1) -> Tensor:
    """Return -A · logprobs + τ/2 · (logprobs - old_logprobs)². Kimi k1.5, arXiv 2501.12599."""
    return vanilla(batch) + tau / 2 * batch.log_ratio_M.square()


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
