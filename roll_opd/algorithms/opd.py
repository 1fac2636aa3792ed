"""On-policy distillation: the teachers' penalty in the advantage.

    reverse_kl_t = l_t - q_t                      sampled token, student minus teacher
    A_t          = A_RL_t - Σ_{k≥0} δ^k · coef · reverse_kl_{t+k}

With several teachers the penalty of a token is the sum over the teachers of its sample,
Σ coef_i (l - q_i) = (Σ coef_i) · l - Σ coef_i · q_i, so a token needs two numbers for any number of teachers.

The sum over k is over action tokens: `returns.discounted_to_go`.

Legend: M scored tokens of a pack.
"""

import torch
from torch import Tensor


def opd_penalty(student_M: Tensor, coefficients_M: Tensor, weighted_teacher_M: Tensor) -> Tensor:
    """Return Σ coef · reverse_kl, f32 [M]; `student_M` is ignored where the coefficient is 0.

    Args:
        student_M: student log-probs, f32.
        coefficients_M: Σ coef_i over the teachers of the token's sample; 0 without teachers and on masked tokens.
        weighted_teacher_M: Σ coef_i · q_i over the same teachers, 0 on masked tokens.
    """
    return torch.where(coefficients_M == 0, 0, coefficients_M * student_M) - weighted_teacher_M
