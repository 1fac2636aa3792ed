"""Comparison of the Triton kernels, in Triton's interpreter on a CPU, with torch in f64; run by
`test_megatron_kernels.py`."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from roll_opd.megatron import triton_kernels


def random(*sizes: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*sizes) * scale


def test_largest_logit_and_sum_are_those_of_logsumexp_with_padding_and_with_an_empty_share() -> None:
    torch.manual_seed(0)
    logits = random(5, 9000, scale=5.0)
    logits[1, 8990:] = -torch.inf  # padding
    logits[2] = -torch.inf  # a rank that has padding alone
    logits[3, 100] = 300.0
    before = logits.clone()
    peaks, sums = triton_kernels.peaks_and_sums(logits)
    assert torch.equal(logits, before)
    real = [0, 1, 3, 4]
    assert torch.equal(peaks[real], logits.amax(1)[real]) and peaks[2] <= -1e30 and sums[2] == 0
    torch.testing.assert_close((peaks + sums.log())[real], logits.double().logsumexp(1)[real], rtol=1e-7, atol=1e-6)


def test_a_logit_that_is_not_finite_gives_no_finite_log_prob() -> None:
    logits = torch.zeros(2, 10)
    logits[0, 3], logits[1, 9] = torch.inf, torch.nan
    peaks, sums = triton_kernels.peaks_and_sums(logits)
    assert not torch.isfinite(logits[:, 0] - (peaks + sums.log())).any()


def test_gradient_of_log_probs_is_that_of_log_softmax_also_for_targets_of_other_ranks() -> None:
    torch.manual_seed(0)
    logits = random(6, 5000, scale=3.0).double().requires_grad_()
    targets, grads, scale = torch.tensor([3, 8, 4999, -5, 5000, 0]), random(6), 0.7
    mine = (targets >= 0) & (targets < 5000)
    normaliser = (logits * scale).logsumexp(1)
    picked = (logits * scale).gather(1, targets.clamp(0, 4999)[:, None])[:, 0]
    ((torch.where(mine, picked, 0) - normaliser) * grads).sum().backward()
    raw = logits.detach().float()
    found = triton_kernels.logprob_gradient(raw, normaliser.detach(), grads, targets, scale, torch.float32)
    torch.testing.assert_close(found.double(), logits.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("heads", "groups", "width", "has_norm"), [(4, 2, 32, True), (3, 1, 24, True), (2, 2, 16, False)]
)
def test_heads_are_normed_and_rotated_and_so_are_their_gradients(
    heads: int, groups: int, width: int, has_norm: bool
) -> None:
    torch.manual_seed(0)
    tokens, each, epsilon = 37, heads // groups, 1e-6
    mixed = random(tokens, groups * (each + 2) * width).requires_grad_()
    weights = [torch.rand(width).add(0.5).requires_grad_() for _ in range(2)] if has_norm else []
    angles = 6 * torch.rand(tokens, width // 2)
    given = weights or [None, None]
    found = triton_kernels.NormAndRotate.apply(
        mixed, *given, angles.cos(), angles.sin(), (heads, groups, width), epsilon
    )

    exact = [tensor.detach().double().requires_grad_() for tensor in (mixed, *weights)]
    by_group = exact[0].view(tokens, groups, each + 2, width)
    query, key = by_group[:, :, :each].reshape(tokens, heads, width), by_group[:, :, each]
    if has_norm:
        query, key = (
            functional.rms_norm(x, (width,), w, epsilon) for x, w in zip((query, key), exact[1:], strict=True)
        )
    # a rotation as the product of complex numbers
    wanted = [_turned(query, angles), _turned(key, angles), by_group[:, :, -1]]
    gradients = [random(*one.shape) for one in wanted]
    ours = torch.autograd.grad(found, (mixed, *weights), gradients)
    theirs = torch.autograd.grad(wanted, exact, [gradient.double() for gradient in gradients])
    for one, other in zip([*found, *ours], [*wanted, *theirs], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def _turned(states: Tensor, angles: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None].to(torch.complex128)
    return torch.cat([turned.real, turned.imag], -1)


def test_swiglu_and_its_gradient_are_torchs() -> None:
    torch.manual_seed(0)
    both = random(7, 1, 2 * 1500).requires_grad_()
    exact = both.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    gradient = random(7, 1, 1500)
    found, wanted = triton_kernels.SwiGLU.apply(both), functional.silu(gate) * up
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    [ours] = torch.autograd.grad(found, both, gradient)
    [theirs] = torch.autograd.grad(wanted, exact, gradient.double())
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_nothing_is_run_without_tokens() -> None:
    peaks, sums = triton_kernels.peaks_and_sums(torch.zeros(0, 7))
    assert len(peaks) == len(sums) == 0
    none = torch.zeros(0)
    arguments = none.double(), none, none.long(), 1.0, torch.bfloat16
    assert triton_kernels.logprob_gradient(torch.zeros(0, 7), *arguments).shape == (0, 7)
    assert triton_kernels.SwiGLU.apply(torch.zeros(0, 1, 8)).shape == (0, 1, 4)
