# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Triton kernels of the output head: softmax statistics and log-prob gradients in one pass over the logits.

torch's operations need six passes over the f32 logits in forward and eight in backward. On an H100, these passes took
half as long as the matrix products of the head. Import this module only on GPUs, because Triton compiles each kernel at
its first call.

Legend: C tokens of a chunk, V vocabulary columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns per iteration
_WARPS = 8


@triton.jit
def _peaks_kernel(logits, peaks, sums, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    # one peak per lane, reduced only at the end; starts finite, because the difference of two infinities is NaN
    peak = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + lanes
        x = tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf"))
        higher = tl.maximum(peak, x)
        total = total * tl.exp(peak - higher) + tl.exp(x - higher)
        peak = higher
    highest = tl.max(peak, 0)
    tl.store(peaks + row, highest)
    tl.store(sums + row, tl.sum((total * tl.exp(peak - highest)).to(tl.float64), 0))


@triton.jit
def _gradient_kernel(logits, out, normalisers, grads, targets, columns, stride, out_stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf")) * scale
    normaliser = tl.load(normalisers + row)
    high = normaliser.to(tl.float32)
    low = (normaliser - high.to(tl.float64)).to(tl.float32)
    grad = tl.load(grads + row) * scale
    slope = tl.where(at == tl.load(targets + row), grad, 0.0) - tl.exp((x - high) - low) * grad
    tl.store(out + row * out_stride + at, slope.to(out.dtype.element_ty), mask=at < columns)


def peaks_and_sums(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (peaks, sums) of each row of logits. The kernel does not modify `logits_CV`.

    - peaks: the largest logit, f32 [C]
    - sums: Σ exp(logit - peak), f64 [C]
    """
    rows, columns = logits_CV.shape
    peaks_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    sums_C = torch.empty(rows, dtype=torch.float64, device=logits_CV.device)
    if rows:
        _launched(_peaks_kernel, (rows,), logits_CV, peaks_C, sums_C, columns, logits_CV.stride(0))
    return peaks_C, sums_C


def logprob_gradient(
    logits_CV: Tensor, log_normaliser_C: Tensor, grad_C: Tensor, target_C: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of raw logits, [C, V] in `dtype`, from the gradient of the log-probs.

    Args:
        logits_CV: raw logits, f32.
        log_normaliser_C: f64, log-normalisers of logits · `scale`.
        grad_C: f32, gradient of the log-probs.
        target_C: int64, columns of the targets. A column outside of 0 to V - 1 is on another rank.
        scale: inverse temperature.
    """
    rows, columns = logits_CV.shape
    out_CV = torch.empty(rows, columns, dtype=dtype, device=logits_CV.device)
    if rows:
        rowwise = log_normaliser_C.contiguous(), grad_C.contiguous(), target_C.contiguous()
        grid = (rows, triton.cdiv(columns, BLOCK))
        _launched(_gradient_kernel, grid, logits_CV, out_CV, *rowwise, columns, logits_CV.stride(0), columns, scale)
    return out_CV


def _launched(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    kernel[grid](*arguments, BLOCK=BLOCK, num_warps=_WARPS)
