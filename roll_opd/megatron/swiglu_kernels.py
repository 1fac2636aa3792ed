# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Triton kernels of SwiGLU: silu(gate) * up, and its gradient, each in one pass.

Megatron's own are compiled by torch, seconds for each of the first sizes of a pack. Import this where a GPU is used:
Triton compiles each kernel at its first call.

Legend: n packed tokens, I inner size on this rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns of a program, which has one token of them


@triton.jit
def _forward_kernel(both, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * width + at, mask=at < width).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, mask=at < width).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=at < width)


@triton.jit
def _backward_kernel(both, grad, grad_both, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * width + at, mask=at < width).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, mask=at < width).to(tl.float32)
    given = tl.load(grad + row * width + at, mask=at < width).to(tl.float32)
    share = tl.sigmoid(gate)
    kind = grad_both.dtype.element_ty
    of_gate = given * up * share * (1 + gate * (1 - share))
    tl.store(grad_both + row * 2 * width + at, of_gate.to(kind), mask=at < width)
    tl.store(grad_both + row * 2 * width + width + at, (given * gate * share).to(kind), mask=at < width)


class SwiGLU(torch.autograd.Function):
    """silu of the first half of the columns times the second: [n, 1, 2I] -> [n, 1, I]."""

    @staticmethod
    def forward(ctx: Any, both_nX: Tensor) -> Tensor:
        both_nX = both_nX.contiguous()
        ctx.save_for_backward(both_nX)
        width = both_nX.size(-1) // 2
        out_nI = both_nX.new_empty(*both_nX.shape[:-1], width)
        kernel: Any = _forward_kernel
        if out_nI.numel():
            kernel[out_nI.numel() // width, triton.cdiv(width, BLOCK)](both_nX, out_nI, width, BLOCK=BLOCK)
        return out_nI

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (both_nX,) = ctx.saved_tensors
        width, grad_nI = both_nX.size(-1) // 2, gradients[0].contiguous()
        grad_nX = torch.empty_like(both_nX)
        kernel: Any = _backward_kernel
        if grad_nI.numel():
            grid = (grad_nI.numel() // width, triton.cdiv(width, BLOCK))
            kernel[grid](both_nX, grad_nI, grad_nX, width, BLOCK=BLOCK)
        return grad_nX
