"""Losses of mixed batches: (1-μ) · PPO on the student's samples, and μ · SFT on demonstrations.

The two parts are normalised separately, through the argument `parts` of `aggregation.token_weights`. Legend: see
`batch`.
"""

import math

import torch
from torch import Tensor

from roll_opd.algorithms.losses.batch import LossBatch
from roll_opd.algorithms.losses.likelihood import sft
from roll_opd.algorithms.losses.ratio import ppo
from roll_opd.algorithms.registry import register_policy_loss


@register_policy_loss("mix", reads_pg_clip=True, needs="demonstrations")
def mix(
    batch: LossBatch, *, mu: float = 0.1, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0
) -> Tensor:
    """Return (1-μ) · PPO on the student's tokens, and μ · (-logprobs) on demonstrations, as in Trinity-RFT."""
    own_M = ppo(batch, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return torch.where(batch.needs("demonstration_M", "mix"), mu * sft(batch), (1 - mu) * own_M)


@register_policy_loss("mix_chord", reads_pg_clip=True, needs="demonstrations")
def mix_chord(
    batch: LossBatch,
    *,
    mu_warmup_steps: int = 0,
    mu_decay_steps: int = 0,
    mu_peak: float = 0.1,
    mu_valley: float = 0.1,
    enable_phi_function: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """Return the loss of CHORD: `mix` with a schedule of μ and a weight of demonstrations. arXiv 2508.11408.

    `chord_mu` is the schedule. The loss of a demonstration's tokens is -sg(p(1-p)) · logprobs. The factor p(1-p) is
    small for probabilities near 0 or 1; `enable_phi_function: false` omits this factor.
    """
    mu = chord_mu(batch.step, mu_warmup_steps, mu_decay_steps, mu_peak, mu_valley)
    demonstration_M = sft(batch)
    if enable_phi_function:
        probability_M = batch.action_logprobs_M.detach().exp()
        demonstration_M = demonstration_M * probability_M * (1 - probability_M)
    own_M = ppo(batch, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return torch.where(batch.needs("demonstration_M", "mix_chord"), mu * demonstration_M, (1 - mu) * own_M)


def chord_mu(step: int, warmup_steps: int, decay_steps: int, peak: float, valley: float) -> float:
    """Return μ at `step`: a linear warm-up to `peak`, then a cosine decay to `valley`, then a constant.

    The first step is step 1. With W warm-up steps, μ is peak/W at the first step, as in Trinity-RFT, and the decay
    starts at step W.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= warmup_steps + decay_steps:
        return valley
    done = (step - warmup_steps) / decay_steps
    return valley + (peak - valley) * (1 + math.cos(math.pi * done)) / 2
