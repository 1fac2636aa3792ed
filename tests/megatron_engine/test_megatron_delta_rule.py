"""The gated delta rule and its convolution against a recurrence per token in f64, and against transformers."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from roll_opd.megatron.gated_delta_net import causal_convolution, chunked_delta_rule, gated_delta_rule, sequence_rows

SIZES = {  # lengths of sequences, key heads, value heads per key head, widths of keys and values
    "short": ([1, 3, 2], 2, 1, 4, 6),
    "chunks": ([64, 65, 130, 0, 7], 1, 3, 8, 5),
    "one": ([200], 3, 2, 16, 16),
}


def inputs(lengths: list[int], groups: int, each: int, width: int, value_width: int) -> list[Tensor]:
    torch.manual_seed(sum(lengths))
    tokens = sum(lengths)
    query, key = torch.randn(2, tokens, groups, width)
    value = torch.randn(tokens, groups, each, value_width)
    log_decay = -torch.rand(tokens, groups, each) * torch.tensor([0.02, 3.0]).repeat(each)[:each]  # slow and fast
    return [query, key, value, log_decay, torch.rand(tokens, groups, each)]


def naive(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, bounds: list[int]) -> Tensor:
    """Compute the recurrence from its definition, one token and one head at a time."""
    out = []
    unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key)]
    for start, end in itertools.pairwise(bounds):
        state = torch.zeros(*value.shape[1:3], query.size(-1), value.size(-1), dtype=value.dtype)
        for t in range(start, end):
            q, k = (x[t, :, None, :, None] for x in unit)
            state = state * log_decay[t].exp()[..., None, None]
            known = (k * state).sum(-2)
            state = state + k * (beta[t][..., None] * (value[t] - known)).unsqueeze(-2)
            out.append((q / query.size(-1) ** 0.5 * state).sum(-2))
    return torch.stack(out)


def packed(*given) -> Tensor:
    return gated_delta_rule(*given[:-1], sequence_rows(given[-1], given[0].device))


def with_gradients(compute, given: list[Tensor], bounds: list[int], seed: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    out = compute(*leaves, bounds)
    (out * seed).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("size", SIZES)
def test_chunks_equal_the_recurrence_with_gradients(size: str) -> None:
    lengths, *rest = SIZES[size]
    given, bounds = inputs(lengths, *rest), list(itertools.accumulate(lengths, initial=0))
    seed = torch.randn_like(given[2])
    wanted = with_gradients(naive, [x.double() for x in given], bounds, seed.double())
    found = with_gradients(packed, given, bounds, seed)
    for one, other in zip(found, wanted, strict=True):
        scale = other.abs().max()
        assert (one - other).abs().max() < 5e-6 * scale


def test_values_in_bf16_differ_by_their_rounding_only() -> None:
    lengths, *rest = SIZES["chunks"]
    given, bounds = inputs(lengths, *rest), list(itertools.accumulate(lengths, initial=0))
    given[:3] = [x.bfloat16() for x in given[:3]]
    found = packed(*given, bounds)
    wanted = naive(*(x.double() for x in given), bounds)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-6)


def test_chunks_equal_those_of_transformers() -> None:
    lengths, groups, each, *widths = SIZES["one"]
    query, key, value, log_decay, beta = inputs(lengths, groups, each, *widths)
    found = chunked_delta_rule(*(x[None] for x in (query, key, value, log_decay, beta)))[0]
    many = [x.repeat_interleave(each, 1)[None] for x in (query, key)]
    rest = {"g": log_decay.flatten(1)[None], "beta": beta.flatten(1)[None], "use_qk_l2norm_in_kernel": True}
    wanted, _ = torch_chunk_gated_delta_rule(*many, value.flatten(1, 2)[None], **rest)
    torch.testing.assert_close(found.flatten(1, 2), wanted[0], rtol=0, atol=2e-6)


def test_a_sequence_never_reads_another_one() -> None:
    """Other tokens before and after a sequence do not change a bit of its outputs, even with a strong decay."""
    lengths, *rest = SIZES["chunks"]
    given, bounds = inputs(lengths, *rest), list(itertools.accumulate(lengths, initial=0))
    before = packed(*given, bounds)
    others = [x.clone() for x in given]
    for tensor in others[:3]:
        tensor[:64], tensor[129:] = 1e3, -1e3
    after = packed(*others, bounds)
    assert torch.equal(before[64:129], after[64:129]) and not torch.equal(before[:64], after[:64])


def test_strong_decay_neither_overflows_nor_gives_nan_gradients() -> None:
    given = inputs([150], 1, 1, 8, 8)
    given[3] = torch.full_like(given[3], -80.0)
    found = with_gradients(packed, given, [0, 150], torch.ones_like(given[2]))
    assert all(torch.isfinite(tensor).all() for tensor in found)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_the_convolution_equals_its_sum_over_taps_with_gradients(taps: int) -> None:
    torch.manual_seed(taps)
    lengths = [5, 1, 3]
    given, weight = torch.randn(9, 6, requires_grad=True), torch.randn(6, taps, requires_grad=True)
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = []
    for row, position in enumerate(positions.tolist()):
        total = sum(given[row - back] * weight[:, taps - 1 - back] for back in range(min(taps, position + 1)))
        rows.append(total * torch.sigmoid(total))
    seed = torch.randn(9, 6)
    wanted = torch.autograd.grad((torch.stack(rows) * seed).sum(), (given, weight))
    out = causal_convolution(given, weight, positions)
    torch.testing.assert_close(out, torch.stack(rows))
    for one, other in zip(torch.autograd.grad((out * seed).sum(), (given, weight)), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_bounds_for_kernels_have_no_empty_sequences() -> None:
    sequences = sequence_rows([0, 0, 3, 3, 5], torch.device("cpu"))
    assert sequences.bounds.tolist() == [0, 3, 5]
    assert sequences.positions_X.tolist() == [0, 1, 2, 0, 1]
