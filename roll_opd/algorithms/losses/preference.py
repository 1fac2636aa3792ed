"""Preference losses: sequences 2i and 2i+1 of a pack are the chosen and the rejected answer of pair i.

Legend: see `batch`; P pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll_opd.algorithms.losses.batch import LossBatch
from roll_opd.algorithms.registry import register_policy_loss
from roll_opd.algorithms.sequences import on_tokens, sequence_sums


@register_policy_loss("dpo", reads_advantages=False, needs="pairs", loss_agg_mode="seq-mean-token-mean")
def dpo(batch: LossBatch, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Return -(1-ε)·log σ(h) - ε·log σ(-h), h = β · [Σ(logprobs - ref) of the chosen - of the rejected].

    arXiv 2305.18290. Every action token of a pair has the pair's loss. Weights of seq-mean-token-mean have the same
    sum for every sequence, so the weighted sum is the mean over pairs, independent of their lengths.

    Raises:
        ValueError: without a reference policy, or with an odd number of sequences.
    """
    if len(batch.lengths) % 2:
        raise ValueError(f"policy loss dpo needs pairs of sequences, but the pack has {len(batch.lengths)}")
    gap_M = torch.where(batch.mask_M, batch.logprobs_M - batch.needs("ref_logprobs_M", "dpo"), 0)
    gap_B = sequence_sums(gap_M, batch.lengths)
    margin_P = beta * (gap_B[0::2] - gap_B[1::2])
    loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    return on_tokens(loss_P.repeat_interleave(2), batch.lengths) * batch.mask_M
