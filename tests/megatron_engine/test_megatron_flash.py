"""Flash attention over packs as they lie, with a plain kernel in its place, against attention over each sequence."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll_opd.config.plan import MicroBatchLimits
from roll_opd.megatron import attention
from roll_opd.megatron.packing import Sample, pack
from roll_opd.samples.sharding import relatives

HEADS, GROUPS, WIDTH = 4, 2, 8
SCALE = 1 / math.sqrt(WIDTH)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of the last tokens of a sequence to all before them."""
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    later = torch.ones(scores.shape[1:]).triu(1 + len(key) - len(query)).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), value)


def plain_kernel(query: Tensor, key: Tensor, value: Tensor, own: Any, whole: Any, scale: float) -> Tensor:
    assert scale == SCALE
    bounds = [itertools.pairwise(one.tolist()) for one in (own.cu_seqlens_q, whole.cu_seqlens_kv)]
    assert (
        max(np.diff(own.cu_seqlens_q)) == own.max_seqlen_q and max(np.diff(whole.cu_seqlens_kv)) == whole.max_seqlen_q
    )
    pieces = [attend(query[a:b], key[c:d], value[c:d]) for (a, b), (c, d) in zip(*bounds, strict=True)]
    return torch.cat(pieces)


@pytest.mark.parametrize("shares", [False, True])
def test_each_sequence_attends_to_itself_alone_with_or_without_shared_prefixes(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_flash_kernel", plain_kernel)
    rng = np.random.default_rng(0)
    samples = []
    for prompt, responses in [(7, (3, 0, 90)), (40, (1, 2, 3, 70)), (64, (32, 32)), (1, (5,))]:
        start = rng.integers(0, 9, prompt)
        samples += [Sample(np.concatenate([start, rng.integers(0, 9, r)]), prompt, {}) for r in responses]
    units = relatives([(sample.tokens, sample.prompt_length) for sample in samples], 1, MicroBatchLimits())
    samples = [samples[number] for unit in units for number in unit.numbers]
    batch = pack(samples, torch.device("cpu"), 32, share_prefixes=shares)
    tokens, places = len(batch.tokens_n), batch.sequences.places_X
    assert (places is not None) == shares
    places = torch.arange(tokens) if places is None else places
    torch.manual_seed(0)
    parts = [torch.randn(tokens, heads, WIDTH, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    found = attention.flash_attention(*parts, batch.sequences, SCALE)
    gradient = torch.randn(tokens, HEADS, WIDTH)
    gradients = torch.autograd.grad(found, parts, gradient)

    wanted = torch.zeros_like(found)
    for (start, end), shared in zip(itertools.pairwise(batch.sequences.bounds), batch.sequences.shared, strict=True):
        whole = attend(*(part[places[start:end]] for part in parts))
        wanted = wanted.index_copy(0, places[start + shared : end], whole[shared:])
    torch.testing.assert_close(found, wanted)
    for one, other in zip(gradients, torch.autograd.grad(wanted, parts, gradient), strict=True):
        torch.testing.assert_close(one, other)


def test_the_kernel_is_not_taken_on_a_cpu_in_f32_or_for_a_part_of_a_sequence() -> None:
    batch = pack([Sample(np.arange(5), 2, {})], torch.device("cpu"), 32)
    query = torch.zeros(32, HEADS, WIDTH, dtype=torch.bfloat16)
    assert not attention.uses_flash_attention(query, query[:, :GROUPS], batch.sequences)
