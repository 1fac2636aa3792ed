"""Losses of mixed batches: (1-μ) · PPO on the student's samples, and μ · SFT on demonstrations.

The two parts are averaged separately, with the argument `parts` of `aggregation.token_weights`.

Legend: see `LossBatch`.
"""

import math

import torch
from torch import Tensor

from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.losses.policy_losses import ppo, sft
from roll_opd.objective.registry import register_policy_loss


@register_policy_loss("mix", reads_pg_clip=True, needs="demonstrations")
def mix(
    batch: LossBatch, *, mu: float = 0.1, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0
) -> Tensor:
    """Return (1-μ) · PPO on the student's tokens and μ · (-logprobs) on demonstrations, as in Trinity-RFT."""
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
    """Return the loss of CHORD. arXiv 2508.11408.

    The loss is the same as in `mix`, with two changes: μ follows the schedule `chord_mu`, and the loss on
    demonstrations is -sg(p(1-p)) · logprobs. The factor p(1-p) is small if the probability p of a token is near 0 or 1.

    Args:
        enable_phi_function: whether the factor p(1-p) is used.
    """
    mu = chord_mu(batch.step, mu_warmup_steps, mu_decay_steps, mu_peak, mu_valley)
    demonstration_M = sft(batch)
    if enable_phi_function:
        probability_M = batch.action_logprobs_M.detach().exp()
        demonstration_M = demonstration_M * probability_M * (1 - probability_M)
    own_M = ppo(batch, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return torch.where(batch.needs("demonstration_M", "mix_chord"), mu * demonstration_M, (1 - mu) * own_M)


def chord_mu(step: int, warmup_steps: int, decay_steps: int, peak: float, valley: float) -> float:
    """Return μ at `step`, from a schedule as in Trinity-RFT.

    μ rises linearly to `peak` in `warmup_steps` steps. It then falls to `valley` along a cosine in `decay_steps` steps,
    and stays at `valley`. The first step is step 1, so μ starts at peak / warmup_steps. The decay starts at step
    `warmup_steps`.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= warmup_steps + decay_steps:
        return valley
    done = (step - warmup_steps) / decay_steps
    return valley + (peak - valley) * (1 + math.cos(math.pi * done)) / 2
