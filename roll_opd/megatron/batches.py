"""A packed micro-batch: several sequences end to end, and the arrays that belong to their scored tokens.

Sequences that begin alike may hold that prefix once: the layers then read its tokens once, for all of them. A pack may
be cut over context-parallel ranks (see `context`); its places then count the pieces of all ranks, end to end.

Legend: N packed tokens, n of them on this rank, X tokens of the same sequences written out, M scored tokens (every
token after a prompt), m of them that this rank predicts, B sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from roll_opd.megatron.context import ALONE, ContextRank, TokenOwners, zigzag
from roll_opd.samples.packing import shared_prefix
from roll_opd.samples.sample import Sample
from roll_opd.samples.tensors import as_tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """What Megatron's layers are told of a pack: one segment, for positions come token by token.

    Attention, which alone must know what belongs together, reads the sequences written out: their cell x is token
    `places_X[x]` of the pack, and the first `shared` cells of each are another one's tokens.
    """

    bounds: tuple[int, ...] = ()  # B + 1, where each sequence begins and ends, written out
    shared: tuple[int, ...] = ()  # B
    places_X: Tensor | None = None  # int64; None: cell x is token x
    cells_N: Tensor | None = None  # int64, the first cell that each token of the pack is written out to; None as above
    whole: PackedSeqParams | None = None  # what Megatron would be told of the sequences written out
    own: PackedSeqParams | None = None  # of each sequence, the tokens that are not another's; None: cut over ranks
    blocks: tuple[Any, ...] | None = None  # of `PackedAttention`, whose first layer makes them for all
    context: ContextRank = ALONE
    first: int = 0  # place of this rank's first token
    padding_n: Tensor | None = None  # bool, which of this rank's tokens are padding
    routes_n: Tensor | None = None  # int16 [n, L, K], -1 of tokens without
    differs_n: Tensor | None = None  # bool [n, L], where routers would choose otherwise; they fill it in


@dataclass(frozen=True)
class PackedBatch:
    """Tensors of one micro-batch on one device."""

    tokens_n: Tensor  # int64
    positions_n: Tensor  # int64, from 0 in each sequence
    targets_m: Tensor  # int64, the scored tokens
    before_m: Tensor  # int64, which of the n tokens is before each of them
    lengths: tuple[int, ...]  # M_b, scored tokens of each sequence
    sequences: PackedSequences
    columns: dict[str, Tensor]  # each [M] or [M, K]
    cut: TokenOwners | None  # None: m is M


def pack(
    samples: Sequence[Sample],
    device: torch.device,
    multiple: int,
    *,
    share_prefixes: bool = False,
    context: ContextRank = ALONE,
    like: Sample | None = None,
    routes: tuple[int, int] | None = None,
) -> PackedBatch:
    """Put `samples` end to end, and pad each rank's share to a multiple of `multiple` with what is not scored.

    With `share_prefixes`, the beginning of a prompt that the sample before has too is not repeated, where that pays
    (see `samples.packing`). Without samples, the batch has the columns of `like` and nothing in them. With `routes`,
    which is (L, K), it brings those that the samples have.
    """
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    places: list[np.ndarray] = []  # of every token of each sequence, padding included
    shared: list[int] = []
    padding: list[np.ndarray] = []
    end = 0

    def add(sequence: np.ndarray, prefix: np.ndarray, is_padding: bool = False) -> None:
        nonlocal end
        own = sequence[len(prefix) :]
        padding.append(np.full(len(own) + -len(own) % context.multiple, is_padding))
        padding[-1][len(own) :] = True
        own = np.pad(own, (0, -len(own) % context.multiple))
        tokens.append(own)
        positions.append(np.arange(len(prefix), len(prefix) + len(own)))
        places.append(np.concatenate([prefix, np.arange(end, end + len(own))]))
        shared.append(len(prefix))
        end += len(own)

    nothing = np.zeros(0, np.int64)
    for number, sample in enumerate(samples):
        earlier = samples[number - 1].tokens if share_prefixes and number else nothing
        prefix = shared_prefix(earlier, sample.tokens, sample.prompt_length)
        add(sample.tokens, places[-1][:prefix] if prefix else nothing)
    if not samples or end % (multiple * context.ranks):
        add(np.zeros(multiple * context.ranks - end % (multiple * context.ranks), np.int64), nothing, is_padding=True)

    routes_N = _routes(samples, places, (end, *routes)) if routes else None
    moved = zigzag([len(own) for own in tokens], context.ranks) if context.ranks > 1 else np.arange(end)
    places = [moved[whole] for whole in places]
    here, order = end // context.ranks, np.argsort(moved)
    first = context.rank * here
    tokens_N, positions_N, padding_N = (np.concatenate(parts)[order] for parts in (tokens, positions, padding))

    ends = [len(sample.tokens) for sample in samples]
    scored = [nothing, *(p[s.prompt_length : e] for p, s, e in zip(places, samples, ends, strict=False))]
    before = [nothing, *(p[s.prompt_length - 1 : e - 1] for p, s, e in zip(places, samples, ends, strict=False))]
    targets_M, before_M = tokens_N[np.concatenate(scored)], np.concatenate(before)
    owner_M = before_M // here
    mine = owner_M == context.rank
    sequences = _sequences(places, shared, device, context, end)
    sequences.padding_n = _tensor(padding_N[first : first + here], device)
    if routes_N is not None:  # not through `as_tensor`, to which int16 is bf16
        sequences.routes_n = torch.from_numpy(routes_N[order][first : first + here]).to(device)
        sequences.differs_n = torch.zeros(sequences.routes_n.shape[:2], dtype=torch.bool, device=device)
    return PackedBatch(
        tokens_n=_tensor(tokens_N[first : first + here], device),
        positions_n=_tensor(positions_N[first : first + here], device),
        targets_m=_tensor(targets_M[mine], device),
        before_m=_tensor(before_M[mine] - first, device),
        lengths=tuple(len(own) for own in scored[1:]),
        sequences=sequences,
        columns=columns_of(samples, like, device),
        cut=TokenOwners(_tensor(owner_M, device), context) if context.ranks > 1 else None,
    )


def _routes(samples: Sequence[Sample], places: Sequence[np.ndarray], shape: tuple[int, int, int]) -> np.ndarray:
    """Return the routes of the tokens at `places`, int16 [N, L, K], of a prefix those of the last that has it."""
    routes_N = np.full(shape, -1, np.int16)
    for sample, whole in zip(samples, places, strict=False):
        if sample.routes is not None:
            routes_N[whole[: len(sample.routes)]] = sample.routes
    return routes_N


def columns_of(samples: Sequence[Sample], like: Sample | None, device: torch.device) -> dict[str, Tensor]:
    """Return the columns of `samples` end to end, each [M] or [M, K]; without samples, those of `like`, empty."""
    known = samples[0] if samples else like
    assert known is not None
    return {
        name: _tensor(np.concatenate([values[:0], *(sample.columns[name] for sample in samples)]), device)
        for name, values in known.columns.items()
    }


def _sequences(
    places: Sequence[np.ndarray], shared: Sequence[int], device: torch.device, context: ContextRank, tokens: int
) -> PackedSequences:
    lengths = [len(whole) for whole in places]
    bounds = (0, *np.cumsum(lengths).tolist())

    def packed_params(boundaries: Sequence[int], longest: int = max(lengths)) -> dict[str, Any]:
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=device)
        bounds_qkv = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
        return {"qkv_format": "thd", "max_seqlen_q": longest, "max_seqlen_kv": longest, **bounds_qkv}

    here = tokens // context.ranks
    pack = PackedSequences(
        **packed_params((0, here)),
        bounds=bounds,
        shared=tuple(shared),
        whole=PackedSeqParams(**packed_params(bounds)),
        context=context,
        first=context.rank * here,
    )
    pack.own = pack.whole
    if any(shared):
        own = [length - common for length, common in zip(lengths, shared, strict=True)]
        pack.own = PackedSeqParams(**packed_params((0, *np.cumsum(own).tolist()), max(own)))
    if any(shared) or context.ranks > 1:
        first_cells = np.unique(np.concatenate(places), return_index=True)[1]
        pack.places_X = _tensor(np.concatenate(places), device)
        pack.cells_N = _tensor(first_cells, device)
    return pack


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return as_tensor(array).to(device)
