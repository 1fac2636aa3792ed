# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Triton kernels of dense layers and of the output head. Import this module only on GPUs: each kernel is compiled.

- One kernel computes norm and rotation of queries and keys in f32, in one pass over the memory. Without it, the
  rotation alone takes nine passes, and the norm and the copies around the two operations take further passes.
- SwiGLU has a kernel because torch would compile Megatron's SwiGLU: seconds for each of the first pack sizes.
- The head's kernels compute softmax statistics and log-prob gradients in one pass over the logits. torch's operations
  need six passes in forward and eight in backward. On an H100, these passes took half as long as the matrix products.

Legend: n packed tokens, H query heads, G key/value heads, D head width, X columns of the projection (G groups, each
with H/G queries, a key and a value), I inner size of SwiGLU on this rank, C tokens of a chunk, V vocabulary
columns."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 32  # tokens per program; a program computes one head


@triton.jit
def _column(head, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """Return the first column of a head. Heads are numbered over queries, then keys, then values."""
    each: tl.constexpr = H // G
    of_query = head // each * (each + 2) + head % each
    of_key = (head - H) * (each + 2) + each
    of_value = (head - H - G) * (each + 2) + each + 1
    return tl.where(head < H, of_query, tl.where(head < H + G, of_key, of_value)) * D


@triton.jit
def _qkv_forward_kernel(
    mixed, queries, keys, query_weight, key_weight, cosines, sines, tokens, stride, epsilon,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    at = tl.arange(0, HALF)[None]
    mask = (rows < tokens) & (at < D // 2)
    source = mixed + rows * stride + _column(head, H, G, D) + at
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + epsilon)  # type: ignore[var-annotated]
        inverse = inverse[:, None]
        weight = query_weight if head < H else key_weight
        known = at < D // 2
        first = first * inverse * tl.load(weight + at, mask=known, other=0.0).to(tl.float32)
        second = second * inverse * tl.load(weight + D // 2 + at, mask=known, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + rows * (D // 2) + at, mask=mask, other=0.0)
    sine = tl.load(sines + rows * (D // 2) + at, mask=mask, other=0.0)
    target = queries + (rows * H + head) * D if head < H else keys + (rows * G + head - H) * D
    target += at
    kind = queries.dtype.element_ty
    tl.store(target, (first * cosine - second * sine).to(kind), mask=mask)
    tl.store(target + D // 2, (second * cosine + first * sine).to(kind), mask=mask)


@triton.jit
def _qkv_backward_kernel(
    mixed, grad_queries, grad_keys, grad_values, grad_mixed, of_weights, query_weight, key_weight, cosines, sines,
    tokens, stride, epsilon,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    rows = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    at = tl.arange(0, HALF)[None]
    mask = (rows < tokens) & (at < D // 2)
    column = _column(head, H, G, D) + at
    target = grad_mixed + rows * ((H + 2 * G) * D) + column
    if head >= H + G:
        given = grad_values + (rows * G + head - H - G) * D + at
        tl.store(target, tl.load(given, mask=mask), mask=mask)
        tl.store(target + D // 2, tl.load(given + D // 2, mask=mask), mask=mask)
    else:
        given = grad_queries + (rows * H + head) * D if head < H else grad_keys + (rows * G + head - H) * D
        given += at
        cosine = tl.load(cosines + rows * (D // 2) + at, mask=mask, other=0.0)
        sine = tl.load(sines + rows * (D // 2) + at, mask=mask, other=0.0)
        turned_first = tl.load(given, mask=mask, other=0.0).to(tl.float32)
        turned_second = tl.load(given + D // 2, mask=mask, other=0.0).to(tl.float32)
        first = turned_first * cosine + turned_second * sine
        second = turned_second * cosine - turned_first * sine
        if NORM:
            source = mixed + rows * stride + column
            x_first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            x_second = tl.load(source + D // 2, mask=mask, other=0.0).to(tl.float32)
            inverse = tl.rsqrt((tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1)) / D + epsilon)  # type: ignore[var-annotated]
            inverse = inverse[:, None]
            x_first *= inverse
            x_second *= inverse
            # this program's part of the weight's gradient; torch sums the parts
            share = of_weights + (head * tl.num_programs(0) + block) * D + tl.arange(0, HALF)
            known = tl.arange(0, HALF) < D // 2
            tl.store(share, tl.sum(first * x_first, 0), mask=known)
            tl.store(share + D // 2, tl.sum(second * x_second, 0), mask=known)
            weight = query_weight if head < H else key_weight
            first *= tl.load(weight + at, mask=at < D // 2, other=0.0).to(tl.float32)
            second *= tl.load(weight + D // 2 + at, mask=at < D // 2, other=0.0).to(tl.float32)
            along = ((tl.sum(first * x_first, 1) + tl.sum(second * x_second, 1)) / D)[:, None]
            first = (first - x_first * along) * inverse
            second = (second - x_second * along) * inverse
        kind = grad_mixed.dtype.element_ty
        tl.store(target, first.to(kind), mask=mask)
        tl.store(target + D // 2, second.to(kind), mask=mask)


class NormAndRotate(torch.autograd.Function):
    """Split a projection [n, X] into queries, keys and values; normalise and rotate the queries and keys.

    - queries: [n, H, D]
    - keys: [n, G, D]
    - values: a view of the projection, which is neither normalised nor rotated

    The norm weights are None if the heads have no norm. The cosines and sines are f32 [n, D/2].
    """

    @staticmethod
    def forward(
        ctx: Any,
        mixed_nX: Tensor,
        query_weight_D: Tensor | None,
        key_weight_D: Tensor | None,
        cosines: Tensor,
        sines: Tensor,
        sizes: tuple[int, int, int],
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups, width = sizes
        tokens = mixed_nX.size(0)
        query_nHD = mixed_nX.new_empty(tokens, heads, width)
        key_nGD = mixed_nX.new_empty(tokens, groups, width)
        grid = (triton.cdiv(tokens, TOKENS), heads + groups)
        weights = _pointers(mixed_nX, query_weight_D, key_weight_D)
        kernel: Any = _qkv_forward_kernel
        kernel[grid](
            mixed_nX, query_nHD, key_nGD, *weights, cosines, sines, tokens, mixed_nX.stride(0), epsilon,
            **_constants(sizes, query_weight_D),
        )  # fmt: skip
        ctx.save_for_backward(mixed_nX, query_weight_D, key_weight_D, cosines, sines)
        ctx.sizes, ctx.epsilon = sizes, epsilon
        value_nGD = mixed_nX.unflatten(1, (groups, heads // groups + 2, width))[:, :, -1]
        return query_nHD, key_nGD, value_nGD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mixed_nX, query_weight_D, key_weight_D, cosines, sines = ctx.saved_tensors
        heads, groups, width = ctx.sizes
        tokens = mixed_nX.size(0)
        grad_nX = torch.empty_like(mixed_nX, memory_format=torch.contiguous_format)
        blocks = triton.cdiv(tokens, TOKENS)
        has_norm = query_weight_D is not None
        of_weights = mixed_nX.new_empty(heads + groups if has_norm else 1, blocks, width, dtype=torch.float32)
        given = [gradient.contiguous() for gradient in gradients]
        weights = _pointers(mixed_nX, query_weight_D, key_weight_D)
        kernel: Any = _qkv_backward_kernel
        kernel[blocks, heads + 2 * groups](
            mixed_nX, *given, grad_nX, of_weights, *weights, cosines, sines, tokens, mixed_nX.stride(0), ctx.epsilon,
            **_constants(ctx.sizes, query_weight_D),
        )  # fmt: skip
        if not has_norm:
            return grad_nX, None, None, None, None, None, None
        of_query = of_weights[:heads].sum((0, 1)).to(query_weight_D.dtype)
        of_key = of_weights[heads:].sum((0, 1)).to(query_weight_D.dtype)
        return grad_nX, of_query, of_key, None, None, None, None


def _pointers(mixed_nX: Tensor, *weights_D: Tensor | None) -> list[Tensor]:
    """Return the norm weights as arguments of a kernel.

    A kernel needs a pointer even for a missing weight. This pointer is `mixed_nX`, which the kernel does not read.
    """
    return [mixed_nX if weight is None else weight for weight in weights_D]


def _constants(sizes: tuple[int, int, int], weight: Tensor | None) -> dict[str, Any]:
    heads, groups, width = sizes
    half = triton.next_power_of_2(width // 2)
    return {"H": heads, "G": groups, "D": width, "HALF": half, "TOKENS": TOKENS, "NORM": weight is not None}


BLOCK = 1024  # columns per program; a program computes one token


@triton.jit
def _swiglu_forward_kernel(both, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * width + at, mask=at < width).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, mask=at < width).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=at < width)


@triton.jit
def _swiglu_backward_kernel(both, grad, grad_both, width, BLOCK: tl.constexpr):
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
    """SwiGLU of a projection: [n, 1, 2I] -> [n, 1, I].

    The result is silu(first half of the columns) * second half of the columns.
    """

    @staticmethod
    def forward(ctx: Any, both_nX: Tensor) -> Tensor:
        both_nX = both_nX.contiguous()
        ctx.save_for_backward(both_nX)
        width = both_nX.size(-1) // 2
        out_nI = both_nX.new_empty(*both_nX.shape[:-1], width)
        kernel: Any = _swiglu_forward_kernel
        if out_nI.numel():
            kernel[out_nI.numel() // width, triton.cdiv(width, BLOCK)](both_nX, out_nI, width, BLOCK=BLOCK)
        return out_nI

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (both_nX,) = ctx.saved_tensors
        width, grad_nI = both_nX.size(-1) // 2, gradients[0].contiguous()
        grad_nX = torch.empty_like(both_nX)
        kernel: Any = _swiglu_backward_kernel
        if grad_nI.numel():
            grid = (grad_nI.numel() // width, triton.cdiv(width, BLOCK))
            kernel[grid](both_nX, grad_nI, grad_nX, width, BLOCK=BLOCK)
        return grad_nX


HEAD_BLOCK = 4096  # columns per iteration
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
        grid = (rows, triton.cdiv(columns, HEAD_BLOCK))
        _launched(_gradient_kernel, grid, logits_CV, out_CV, *rowwise, columns, logits_CV.stride(0), columns, scale)
    return out_CV


def _launched(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    kernel[grid](*arguments, BLOCK=HEAD_BLOCK, num_warps=_WARPS)
