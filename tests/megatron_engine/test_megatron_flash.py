"""Flash attention over packs without padding, with a plain kernel in its place, against attention per sequence."""

import itertools
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll_opd.config.plan import MicroBatchLimits
from roll_opd.megatron import flash_kernels
from roll_opd.megatron.packing import Sample, pack
from roll_opd.samples.micro_batches import relatives

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


# the arguments of `flash_attn_varlen_func` by the names of each release: flash-attn 2.8.3, hopper/ and cute/ of 4.0
def of_package(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = False,
    deterministic: bool = False,
) -> Tensor:
    assert causal and deterministic == torch.are_deterministic_algorithms_enabled()
    own = SimpleNamespace(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    whole = SimpleNamespace(cu_seqlens_kv=cu_seqlens_k, max_seqlen_kv=max_seqlen_k, max_seqlen_q=max_seqlen_k)
    return plain_kernel(q, k, v, own, whole, softmax_scale)


def with_sums(*tensors: Tensor, **settings: Any) -> tuple[Tensor, None]:
    return of_package(*tensors, **settings), None


PACKAGES = {"flash2": of_package, "flash3": of_package, "flash4": with_sums}


def choose(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flash_kernels.VARIABLE, kernel)
    flash_kernels._varlen_function.cache_clear()
    monkeypatch.setattr(flash_kernels, "_torch_kernel", plain_kernel)
    for name, function in PACKAGES.items():
        module = flash_kernels.KERNELS[name].module
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_varlen_func=function))  # type: ignore[arg-type]
    if kernel == "flash4":  # the package around it
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=None, __path__=[]))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    flash_kernels._varlen_function.cache_clear()


@pytest.mark.parametrize("kernel", [*flash_kernels.KERNELS])
@pytest.mark.parametrize("shares", [False, True])
def test_each_sequence_attends_to_itself_alone_with_or_without_shared_prefixes(
    shares: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(kernel, monkeypatch)
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
    found = flash_kernels.flash_attention(*parts, batch.sequences, SCALE)
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
    assert not flash_kernels.uses_flash_attention(query, query[:, :GROUPS], batch.sequences)


H100, A100 = (9, 0), (8, 0)


def test_an_unknown_kernel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flash_kernels.VARIABLE, "flash5")
    with pytest.raises(
        ValueError, match="ROLL_OPD_FLASH_ATTENTION=flash5 is not a known kernel; use one of torch, flash2"
    ):
        flash_kernels.check_kernel(H100)


def test_a_kernel_of_another_card_or_a_missing_package_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(flash_kernels.VARIABLE, raising=False)
    flash_kernels.check_kernel(A100)
    choose("flash3", monkeypatch)
    flash_kernels.check_kernel(H100)
    with pytest.raises(ValueError, match=r"does not support compute capability 8\.0"):
        flash_kernels.check_kernel(A100)
    flash_kernels._varlen_function.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be imported"):
        flash_kernels.check_kernel(H100)


def test_heads_that_are_too_wide_for_a_package_get_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flash_kernels.VARIABLE, "flash4")
    assert flash_kernels._kernel_for(128) == flash_kernels.KERNELS["flash4"]
    assert flash_kernels._kernel_for(256) == flash_kernels.KERNELS["torch"]
