"""The teacher's part of the advantage in on-policy distillation.

    reverse_kl_t = l_t - q_t                      sampled token, student minus teacher
    A_t          = A_RL_t - Σ_{k≥0} δ^k · coef · reverse_kl_{t+k}

With several teachers the penalty of a token is the sum over those its sample is routed to,
Σ coef_i (l - q_i) = (Σ coef_i) · l - Σ coef_i · q_i, so a token carries two numbers, however many teachers there are.

The sum over k is over action tokens: `returns.discounted_to_go`.

Legend: M scored tokens of a pack.
"""

import torch
from torch import Tensor


def opd_penalty(student_M: Tensor, coefficients_M: Tensor, weighted_teacher_M: Tensor) -> Tensor:
    """Return Σ coef · reverse_kl, f32 [M]. Where the coefficient is 0, `student_M` is not read: it may be anything.

    Args:
        student_M: student log-probs, f32.
        coefficients_M: Σ coef_i over the teachers of the token's sample; 0 where it has none or on masked tokens.
        weighted_teacher_M: Σ coef_i · q_i over the same teachers, 0 on masked tokens.
    """
    return torch.where(coefficients_M == 0, 0, coefficients_M * student_M) - weighted_teacher_M
