"""Attention over packs with shared prefixes, and rotary embeddings of packs: each against a plain implementation."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer import TransformerConfig
from megatron_ranks import Job
from megatron_registry import jobs, operation

from roll_opd.config.plan import MicroBatchLimits
from roll_opd.megatron import rotary
from roll_opd.megatron.attention import PackedAttention, with_expanded_packs
from roll_opd.megatron.packing import pack
from roll_opd.samples.micro_batches import relatives
from roll_opd.samples.sample import Sample

WINDOWS = (0, 3, 33)
# prompt and responses of each group
SHAPES = [[(7, (3, 0, 90)), (40, (1, 2, 3, 70)), (1, (5,))], [(3, (4,)), (5, (6,))], [(64, (32, 32, 32))]]
# heads, width, lengths of the sequences, dtype
ROTATED = [
    (4, 32, (5, 64, 1, 26), torch.float32),
    (3, 8, (31, 33), torch.float32),
    (2, 64, (96,), torch.bfloat16),
]


class PlainAttention(torch.nn.Module):
    """Attention over each sequence of a pack by itself, with a window or without."""

    window = 0

    def forward(self, query: Any, key: Any, value: Any, attention_mask: None, packed_seq_params: Any) -> torch.Tensor:
        outs = []
        for start, end in itertools.pairwise(packed_seq_params.cu_seqlens_q.tolist()):
            q, k, v = (t[start:end] for t in (query, key, value))
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
            weights = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.size(-1))
            hidden = torch.ones(end - start, end - start).triu(1).bool()  # later keys, and those before the window
            if self.window:
                hidden |= torch.ones_like(hidden).tril(-self.window)
            weights = weights.masked_fill(hidden, -math.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        return torch.cat(outs)


@operation
def packed_attention(job: Job, root: Path) -> None:
    """Attention of groups of samples that share their prompts, and its gradients."""
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0
    )
    packed, plain = PackedAttention(config, 1, None, "self"), with_expanded_packs(PlainAttention)()
    rng, found = np.random.default_rng(0), []
    for window, shapes in itertools.product(WINDOWS, SHAPES):
        packed.window = plain.window = window
        found.append(_attended(packed, plain, _samples(shapes, rng)))
    (root / f"{job['name']}.json").write_text(json.dumps(found))


def _samples(shapes: Sequence[tuple[int, tuple[int, ...]]], rng: np.random.Generator) -> list[Sample]:
    """Groups of samples of these lengths, in the order in which they are packed."""
    samples = []
    for prompt, responses in shapes:
        tokens = rng.integers(0, 9, prompt)
        samples += [Sample(np.concatenate([tokens, rng.integers(0, 9, r)]), prompt, {}) for r in responses]
    if len(shapes) == 1:  # a conversation goes on, and another one branches off
        whole = samples[1].tokens
        more = [np.concatenate([whole, rng.integers(0, 9, 9)]), np.concatenate([whole[:70], rng.integers(0, 9, 40)])]
        samples += [Sample(more[0], len(whole) + 4, {}), Sample(more[1], 90, {})]
    samples = [samples[n] for n in rng.permutation(len(samples))]
    units = relatives([(sample.tokens, sample.prompt_length) for sample in samples], 1, MicroBatchLimits())
    return [samples[n] for unit in units for n in unit.numbers]


def _attended(packed: torch.nn.Module, plain: torch.nn.Module, samples: list[Sample]) -> dict[str, float]:
    """How many places sharing saves, and the differences of attention and gradients."""
    batch = pack(samples, torch.device("cpu"), 32, share_prefixes=True)
    apart = pack(samples, torch.device("cpu"), 32)
    for one in (batch, apart):  # the tokens at the places of every sequence, and those before, are its own
        at = one.targets_m.split(one.lengths)
        before = one.tokens_n[one.before_m].split(one.lengths)
        for sample, own, earlier in zip(samples, at, before, strict=True):
            assert own.tolist() == sample.tokens[sample.prompt_length :].tolist()
            assert earlier.tolist() == sample.tokens[sample.prompt_length - 1 : -1].tolist()
    torch.manual_seed(0)
    parts = [torch.randn(len(batch.tokens_n), heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    other = [part.detach().clone().requires_grad_() for part in parts]
    mine = packed(*parts, None, packed_seq_params=batch.sequences)
    theirs = plain(*other, None, packed_seq_params=batch.sequences)
    places = batch.sequences.places_X
    places = torch.arange(len(batch.tokens_n)) if places is None else places
    real = places[: batch.sequences.bounds[len(samples)]].unique()
    gradient = torch.randn(len(real), 32)
    mine[real].backward(gradient)
    theirs[real].backward(gradient)
    return {
        "saved": len(apart.tokens_n) - len(batch.tokens_n),
        "difference": (mine[real] - theirs[real]).abs().max().item(),
        "of gradients": max((a.grad - b.grad).abs().max().item() for a, b in zip(parts, other, strict=True)),
    }


@operation
def rotated(job: Job, root: Path) -> None:
    """Whether rotary embeddings and their gradients have megatron-core's bits, also when they are repeated."""
    with mock.patch.object(rotary, "stock", None):  # what is tested here never falls back
        found = [_rotated(*case) for case in ROTATED]
    (root / f"{job['name']}.json").write_text(json.dumps(found))


def _rotated(heads: int, width: int, lengths: tuple[int, ...], dtype: torch.dtype) -> list[bool]:
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=heads * width, num_attention_heads=heads)
    bounds = torch.tensor([0, sum(lengths)], dtype=torch.int32)
    half = torch.arange(101.0)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    freqs = torch.cat([half, half], -1)[:, None, None]
    t = torch.randn(sum(lengths), heads, width + 3, dtype=dtype)[..., :width]
    gradient = torch.randn(t.shape, dtype=dtype)
    freqs = torch.cat([freqs[:length] for length in lengths])
    mine, other = t.clone().requires_grad_(), t.clone().requires_grad_()
    turned = rotary.apply_rotary(mine, freqs, config, bounds)
    wanted = _apply_rotary_pos_emb_bshd(other.unsqueeze(1), freqs).squeeze(1)
    turned.backward(gradient)
    wanted.backward(gradient)
    again = rotary.apply_rotary(mine, freqs, config, bounds)
    other_freqs = rotary.apply_rotary(mine, freqs * 2, config, bounds)
    assert mine.grad is not None and other.grad is not None
    return [
        torch.equal(turned, wanted),
        torch.equal(mine.grad, other.grad),
        torch.equal(turned, again),
        not torch.equal(turned, other_freqs),
    ]


@jobs
def layer_jobs() -> Iterator[Job]:
    for name in ("packed_attention", "rotated"):
        yield {"op": name, "name": name, "layout": "tp1"}
