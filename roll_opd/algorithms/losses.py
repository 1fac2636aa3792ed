"""Policy losses, a number a token. Aggregation, masks and layouts are not their business.

All take log-probs under the weights being trained (`logprobs_M`, has gradient), those of the weights that are
the reference of the update (`old_logprobs_M`, none), and advantages (none); all f32 [M], and return f32 [M].
"""

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 is already absurd; without the clamp one wild token overflows

PolicyLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def probability_ratio(logprobs_M: Tensor, old_logprobs_M: Tensor) -> Tensor:
    """exp(logprobs - old_logprobs), the log-ratio clamped to ±20."""
    return (logprobs_M - old_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_sampling(logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor) -> Tensor:
    """-A · r. Thinking Machines, "On-Policy Distillation" (2025)."""
    return -advantages_M * probability_ratio(logprobs_M, old_logprobs_M)


def ppo(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """max(-A·r, -A·clip(r, 1-low, 1+high)), and for A < 0 at most -A·dual_clip. arXiv 1707.06347, 1912.09729."""
    ratio_M = probability_ratio(logprobs_M, old_logprobs_M)
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_M = torch.maximum(-advantages_M * ratio_M, -advantages_M * clipped_M)
    if dual_clip is None:
        return loss_M
    return torch.where(advantages_M < 0, torch.minimum(loss_M, -advantages_M * dual_clip), loss_M)


POLICY_LOSSES: dict[str, Callable[..., Tensor]] = {"importance_sampling": importance_sampling, "ppo": ppo}
