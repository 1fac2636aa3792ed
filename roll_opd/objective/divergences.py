"""Divergences between the student's and the teacher's next-token distributions, as sums over columns.

A column is a token of the vocabulary, or the bucket of all tokens outside the top-k. s and t are the probabilities of a
column under the student and the teacher, and m is a mixture of s and t:

    reverse_kl            KL(s || t)
    forward_kl            KL(t || s)
    jsd(β)                β KL(t || m) + (1-β) KL(s || m),  m = β t + (1-β) s      GKD, arXiv 2306.13649
    skewed_reverse_kl(α)  KL(s || m),                       m = α s + (1-α) t      DistiLLM, arXiv 2402.03898
    skewed_forward_kl(α)  KL(t || m),                       m = α t + (1-α) s

β is the teacher's weight. At β = 0 and β = 1, the formula of jsd gives 0, because the mixture equals s or t. In these
two cases, `jsd` is a limit instead, as in TRL. At β = 0, it is the limit of jsd/β, which is forward_kl. At β = 1, it is
the limit of jsd/(1-β), which is reverse_kl. With α = 0, the skewed divergences are the plain KLs.

KL(p || q) is computed as the sum of p log(p/q) - p + q over all columns. The sum of -p + q is 0, and so is its gradient
with respect to the logits, so it does not change the divergence. But with -p + q, no term of the sum is negative, and a
term is of second order in p - q if p is close to q. For equal distributions, the result is therefore 0 instead of a sum
of rounding errors.

Legend: K columns, M tokens. All values are log-probs. If a model gives a column the probability 0, its log-prob is
-inf.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ColumnSum:
    """A sum over columns.

    The term of a column depends on the log-probs of student and teacher, or only on the log-prob of the student.
    `value` and `slope` never return NaN if their arguments are log-probs. If the divergence is infinite, `value` is
    inf.
    """

    value: Callable[..., Tensor]  # term of a column in the sum
    slope: Callable[..., Tensor]  # derivative of the term with respect to the student's log-prob

    def __call__(self, student_logprobs: Tensor, *others: Tensor) -> Tensor:
        """Return the sum over the last dimension of arrays [..., K].

        Only `student_logprobs` gets a gradient.
        """
        return _Sum.apply(self, student_logprobs, *others)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, measure: ColumnSum, *logprobs: Tensor) -> Tensor:
        ctx.save_for_backward(*logprobs)
        ctx.measure = measure
        return measure.value(*logprobs).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        student_grad = grad[..., None] * ctx.measure.slope(*ctx.saved_tensors)
        return None, student_grad, *[None] * (len(ctx.saved_tensors) - 1)


def divergence(name: str, *, beta: float = 0.5, alpha: float = 0.1) -> ColumnSum:
    """Return the divergence `name`, a key of `DIVERGENCES`.

    Args:
        beta: the teacher's weight in the mixture of jsd, from 0 to 1.
        alpha: weight of the first distribution in the mixture of a skewed divergence, at least 0 and below 1.

    Raises:
        ValueError: if the name is unknown or a parameter is out of its range.
    """
    if name not in DIVERGENCES:
        raise ValueError(f"divergence {name!r} is unknown; use one of {', '.join(DIVERGENCES)}")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta of jsd is {beta}; use a number from 0 to 1")
    if not 0 <= alpha < 1:
        raise ValueError(
            f"alpha of {name} is {alpha}; use a number from 0 to below 1 (at 1 the divergence is always 0)"
        )
    return DIVERGENCES[name](beta, alpha)


def topk_divergence(student_ML: Tensor, teacher_ML: Tensor, measure: ColumnSum) -> Tensor:
    """Return the divergence over K tokens and the bucket of all other tokens, f32 [M].

    Only `student_ML` gets a gradient. The result is never negative. It is at most the divergence over the whole
    vocabulary, by the data-processing inequality. If the K tokens are the whole vocabulary, the bucket is empty, and
    the two divergences are equal.

    Args:
        student_ML: the student's log-probs of K different tokens, followed by the log-prob of the bucket; L = K + 1.
            Compute the log-prob of the bucket as a sum over its tokens. The formula log(1 - Σp) would lose all digits
            if the K tokens have nearly all of the probability.
        teacher_ML: the teacher's log-probs of the same columns.
    """
    # renormalised in f64, as rounding in f32 would dominate the gradient of a confident student
    return measure(*(side_ML.double().log_softmax(-1) for side_ML in (student_ML, teacher_ML))).float()


def _times(probability: Tensor, log_ratio: Tensor) -> Tensor:
    """Return probability · log_ratio. Where the probability is 0, the result is 0, even if the ratio is infinite."""
    return torch.where(probability > 0, probability * log_ratio, 0.0)


def _log_mixture(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """Return log(weight · e^first + (1-weight) · e^second)."""
    return torch.logaddexp(first + math.log(weight), second + math.log1p(-weight))


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the terms p log(p/q) - p + q of KL(p || q), one per column.

    The arguments are log-probs.
    """
    probability = p.exp()
    return _times(probability, p - q) - probability + q.exp()


def _surprise(student: Tensor) -> Tensor:
    return -_times(student.exp(), student)


def _surprise_slope(student: Tensor) -> Tensor:
    return _surprise(student) - student.exp()


def _reverse_kl_slope(student: Tensor, teacher: Tensor) -> Tensor:
    return _times(student.exp(), student - teacher)


def _forward_kl_slope(student: Tensor, teacher: Tensor) -> Tensor:
    return student.exp() - teacher.exp()


def _jsd(student: Tensor, teacher: Tensor, *, beta: float) -> Tensor:
    mixture = _log_mixture(teacher, student, beta)
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _jsd_slope(student: Tensor, teacher: Tensor, *, beta: float) -> Tensor:
    # the gradients through the mixture in the two KLs cancel in the weighted sum
    return (1 - beta) * _times(student.exp(), student - _log_mixture(teacher, student, beta))


def _skewed_reverse_kl(student: Tensor, teacher: Tensor, *, alpha: float) -> Tensor:
    return _kl(student, _log_mixture(student, teacher, alpha))


def _skewed_reverse_kl_slope(student: Tensor, teacher: Tensor, *, alpha: float) -> Tensor:
    log_ratio, probability = student - _log_mixture(student, teacher, alpha), student.exp()
    return _times(probability, log_ratio) - _times(alpha * probability, torch.expm1(log_ratio))


def _skewed_forward_kl(student: Tensor, teacher: Tensor, *, alpha: float) -> Tensor:
    return _kl(teacher, _log_mixture(teacher, student, alpha))


def _skewed_forward_kl_slope(student: Tensor, teacher: Tensor, *, alpha: float) -> Tensor:
    log_ratio = teacher - _log_mixture(teacher, student, alpha)
    return -_times((1 - alpha) * student.exp(), torch.expm1(log_ratio))


REVERSE_KL = ColumnSum(_kl, _reverse_kl_slope)
ENTROPY = ColumnSum(_surprise, _surprise_slope)
FORWARD_KL = ColumnSum(lambda student, teacher: _kl(teacher, student), _forward_kl_slope)


def _jsd_of(beta: float, alpha: float) -> ColumnSum:
    if beta in (0, 1):
        return REVERSE_KL if beta else FORWARD_KL
    return ColumnSum(partial(_jsd, beta=beta), partial(_jsd_slope, beta=beta))


def _skewed_reverse_of(beta: float, alpha: float) -> ColumnSum:
    if not alpha:
        return REVERSE_KL
    return ColumnSum(partial(_skewed_reverse_kl, alpha=alpha), partial(_skewed_reverse_kl_slope, alpha=alpha))


def _skewed_forward_of(beta: float, alpha: float) -> ColumnSum:
    if not alpha:
        return FORWARD_KL
    return ColumnSum(partial(_skewed_forward_kl, alpha=alpha), partial(_skewed_forward_kl_slope, alpha=alpha))


# name -> (β, α) -> the divergence
DIVERGENCES: dict[str, Callable[[float, float], ColumnSum]] = {
    "reverse_kl": lambda beta, alpha: REVERSE_KL,
    "forward_kl": lambda beta, alpha: FORWARD_KL,
    "jsd": _jsd_of,
    "skewed_reverse_kl": _skewed_reverse_of,
    "skewed_forward_kl": _skewed_forward_of,
}
