"""Packed micro-batches: sequences concatenated without padding, and arrays for their scored tokens.

A prefix that several sequences share may be stored only once. The layers then compute the prefix once for all of these
sequences. With context parallelism, a pack is split over ranks (see the second part), and positions in the pack
count the tokens of all ranks.

Legend: N packed tokens, n of them on this rank, X tokens of the expanded sequences (each with its prefix), M scored
tokens (all tokens after a prompt), m of them predicted by this rank, B sequences.

Context parallelism: splitting a pack's tokens over ranks, and gathering per-token results.

Each sequence is split into 2·C equal chunks. Rank r of C has chunks r and 2·C - 1 - r ("zigzag"), because this balances
the work of causal attention. A scored token is predicted on the rank that holds the hidden state before it; the token
itself may be on a different rank.

Legend: C context ranks, N packed tokens of all ranks, M scored tokens, m of them predicted by this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from roll_opd.samples.micro_batches import shared_prefix
from roll_opd.samples.sample import Sample
from roll_opd.samples.transport import as_tensor


@dataclass(frozen=True)
class ContextRank:
    """Rank and size of a context-parallel group."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def multiple(self) -> int:
        """Sequence lengths are padded to a multiple of this number."""
        return 2 * self.ranks if self.ranks > 1 else 1


ALONE = ContextRank()


def zigzag(lengths: Sequence[int], ranks: int) -> np.ndarray:
    """Return the position of each token after the tokens are split over the ranks, int64 [N].

    A position is an index into the tokens of all ranks, concatenated in the order of the ranks. Each sequence length is
    a multiple of 2·ranks, so all ranks have the same number of tokens.
    """
    piece, start, places = sum(lengths) // ranks, 0, [np.zeros(0, np.int64)]
    for length in lengths:
        chunk = length // (2 * ranks)
        number, within = np.divmod(np.arange(length), max(chunk, 1))
        second = number >= ranks
        rank = np.where(second, 2 * ranks - 1 - number, number)
        places.append(rank * piece + start + second * chunk + within)
        start += 2 * chunk
    return np.concatenate(places)


@dataclass(frozen=True)
class TokenOwners:
    """For each of M scored tokens, the context rank that predicts the token."""

    owner_M: Tensor  # int64
    context: ContextRank

    @property
    def mine_M(self) -> Tensor:
        """Mask of the tokens predicted by this rank, bool [M]."""
        return self.owner_M == self.context.rank

    def at(self, rows_R: Tensor) -> "TokenOwners":
        """Return the owners of the R scored tokens with the indices `rows_R` (int64 [R])."""
        return replace(self, owner_M=self.owner_M[rows_R])

    def mine_among(self, rows_R: Tensor) -> Tensor:
        """Return the tokens of `rows_R` that this rank predicts, in the order of `rows_R`.

        A token is returned as its index among the m tokens that this rank predicts.
        """
        number_M = self.mine_M.cumsum(0) - 1
        return number_M[rows_R[self.mine_M[rows_R]]]

    def whole(self, values_m: Tensor) -> Tensor:
        """Gather the values of all ranks in token order, [M, ...]. Collective.

        Every rank gets all values, and all ranks compute the same loss from them. Each rank therefore has the complete
        gradient of its own values, and the backward pass needs no communication.
        """
        return _Gather.apply(values_m, self)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_m: Tensor, owners: TokenOwners) -> Tensor:
        ctx.mine_M = owners.mine_M
        counts = torch.bincount(owners.owner_M, minlength=owners.context.ranks).tolist()
        padded = values_m.new_zeros(max(counts), *values_m.shape[1:])
        padded[: len(values_m)] = values_m
        gathered = [torch.empty_like(padded) for _ in counts]
        if max(counts):
            dist.all_gather(gathered, padded, group=owners.context.group)
        joined = values_m.new_empty(len(owners.owner_M), *values_m.shape[1:])
        for rank, (count, values) in enumerate(zip(counts, gathered, strict=True)):
            joined[owners.owner_M == rank] = values[:count]
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.mine_M], None


@dataclass
class PackedSequences(PackedSeqParams):
    """Parameters of a pack for Megatron's layers.

    For the layers, a pack is a single segment, because the layers also get the position of each token.

    Only attention needs to know where each sequence begins and ends. Attention expands the sequences, so that each
    sequence includes its prefix. Token x of the expanded sequences is stored at index `places_X[x]` of the pack. The
    first `shared[b]` tokens of sequence b are stored with an earlier sequence of the pack.
    """

    bounds: tuple[int, ...] = ()  # B + 1, boundaries of the expanded sequences
    shared: tuple[int, ...] = ()  # B
    places_X: Tensor | None = None  # int64; None: the identity
    cells_N: Tensor | None = None  # int64, first index of each packed token among the X tokens; None: identity
    whole: PackedSeqParams | None = None  # segments of the expanded sequences
    own: PackedSeqParams | None = None  # segments of the unshared tokens; None if these are split over context ranks
    blocks: tuple[Any, ...] | None = None  # blocks of `PackedAttention`; the first layer creates them for all layers
    rows: Any = None  # `SequenceRows` of Gated DeltaNet layers; the first such layer creates them for all
    context: ContextRank = ALONE
    first: int = 0  # position of this rank's first token
    padding_n: Tensor | None = None  # bool, padding among this rank's tokens
    routes_n: Tensor | None = None  # int16 [n, L, K], -1 for tokens without routes
    differs_n: Tensor | None = None  # bool [n, L], set by routers whose choice differs from the routes


@dataclass(frozen=True)
class PackedBatch:
    """Tensors of one micro-batch on one device."""

    tokens_n: Tensor  # int64
    positions_n: Tensor  # int64, from 0 in each sequence
    targets_m: Tensor  # int64, the scored tokens
    before_m: Tensor  # int64, index of the token before each scored token, among the n tokens
    lengths: tuple[int, ...]  # scored tokens of each sequence
    sequences: PackedSequences
    columns: dict[str, Tensor]  # each [M] or [M, K]
    owners: TokenOwners | None  # None without context parallelism: m = M


_NOTHING = np.zeros(0, np.int64)


@dataclass
class _PackedRows:
    """Arrays of a pack on the host.

    Each list has one entry per sequence, in the order of the pack.
    """

    multiple: int  # each sequence's unshared tokens are padded to a multiple of this number
    tokens: list[np.ndarray] = field(default_factory=list)  # unshared tokens, padded
    positions: list[np.ndarray] = field(default_factory=list)  # positions of the unshared tokens
    padding: list[np.ndarray] = field(default_factory=list)  # bool, padding among the unshared tokens
    places: list[np.ndarray] = field(default_factory=list)  # positions in the pack, with padding
    shared: list[int] = field(default_factory=list)  # number of tokens in the shared prefix
    end: int = 0

    def append(self, sequence: np.ndarray, prefix: np.ndarray = _NOTHING, *, is_padding: bool = False) -> None:
        """Append a sequence.

        `prefix`: positions, in the pack, of the prefix that the sequence shares with an earlier sequence. These tokens
        are already in the pack, so only the other tokens are appended.
        """
        own = sequence[len(prefix) :]
        pad = -len(own) % self.multiple
        self.padding.append(np.concatenate([np.full(len(own), is_padding), np.ones(pad, bool)]))
        own = np.pad(own, (0, pad))
        self.tokens.append(own)
        self.positions.append(np.arange(len(prefix), len(prefix) + len(own)))
        self.places.append(np.concatenate([prefix, np.arange(self.end, self.end + len(own))]))
        self.shared.append(len(prefix))
        self.end += len(own)


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
    """Concatenate `samples` into a pack.

    Unscored padding is added, so that the number of tokens per rank is a multiple of `multiple`.

    Args:
        share_prefixes: if two consecutive samples share a prompt prefix, store it once, provided that this saves work
            (see `samples.micro_batches`).
        like: a sample with the same columns. If `samples` is empty, the pack has empty columns with its names and
            dtypes.
        routes: (L, K), the shape of a token's routes. If it is given, the pack includes the routes of the samples.
    """
    rows = _rows(samples, multiple * context.ranks, context.multiple, share_prefixes)
    routes_N = _routes(samples, rows.places, (rows.end, *routes)) if routes else None
    moved = zigzag([len(own) for own in rows.tokens], context.ranks) if context.ranks > 1 else np.arange(rows.end)
    places = [moved[whole] for whole in rows.places]
    per_rank, order = rows.end // context.ranks, np.argsort(moved)
    first = context.rank * per_rank
    local = slice(first, first + per_rank)
    tokens_N, positions_N, padding_N = (np.concatenate(x)[order] for x in (rows.tokens, rows.positions, rows.padding))

    scored, before = _scored_places(samples, places)
    targets_M, before_M = tokens_N[np.concatenate(scored)], np.concatenate(before)
    owner_M = before_M // per_rank
    mine_M = owner_M == context.rank
    sequences = _sequences(places, rows.shared, device, context, rows.end)
    sequences.padding_n = _tensor(padding_N[local], device)
    if routes_N is not None:  # without `as_tensor`, which reads int16 as bf16
        sequences.routes_n = torch.from_numpy(routes_N[order][local]).to(device)
        sequences.differs_n = torch.zeros(sequences.routes_n.shape[:2], dtype=torch.bool, device=device)
    return PackedBatch(
        tokens_n=_tensor(tokens_N[local], device),
        positions_n=_tensor(positions_N[local], device),
        targets_m=_tensor(targets_M[mine_M], device),
        before_m=_tensor(before_M[mine_M] - first, device),
        lengths=tuple(len(own) for own in scored[1:]),
        sequences=sequences,
        columns=columns_of(samples, like, device),
        owners=TokenOwners(_tensor(owner_M, device), context) if context.ranks > 1 else None,
    )


def columns_of(samples: Sequence[Sample], like: Sample | None, device: torch.device) -> dict[str, Tensor]:
    """Concatenate each column of `samples`. The results are [M] or [M, K].

    If `samples` is empty, the columns are empty, with the names and dtypes of `like`.
    """
    known = samples[0] if samples else like
    assert known is not None
    return {
        name: _tensor(np.concatenate([values[:0], *(sample.columns[name] for sample in samples)]), device)
        for name, values in known.columns.items()
    }


def _rows(samples: Sequence[Sample], multiple: int, row_multiple: int, share_prefixes: bool) -> _PackedRows:
    """Return the rows of all samples, padded to a multiple of `multiple` tokens."""
    rows = _PackedRows(row_multiple)
    for number, sample in enumerate(samples):
        earlier = samples[number - 1].tokens if share_prefixes and number else _NOTHING
        length = shared_prefix(earlier, sample.tokens, sample.prompt_length)
        rows.append(sample.tokens, rows.places[-1][:length] if length else _NOTHING)
    if not samples or rows.end % multiple:
        rows.append(np.zeros(multiple - rows.end % multiple, np.int64), is_padding=True)
    return rows


def _scored_places(
    samples: Sequence[Sample], places: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (scored, before): for each sample, the positions of its scored tokens, and of the tokens before them.

    Both lists start with an empty array, so that they can be concatenated even without samples.
    """
    scored, before = [_NOTHING], [_NOTHING]
    for sample, whole in zip(samples, places, strict=False):
        start, end = sample.prompt_length, len(sample.tokens)
        scored.append(whole[start:end])
        before.append(whole[start - 1 : end - 1])
    return scored, before


def _routes(samples: Sequence[Sample], places: Sequence[np.ndarray], shape: tuple[int, int, int]) -> np.ndarray:
    """Return the routes of the packed tokens, int16 [N, L, K].

    If several samples share a prefix, the prefix gets the routes of the last of these samples.
    """
    routes_N = np.full(shape, -1, np.int16)
    for sample, whole in zip(samples, places, strict=False):
        if sample.routes is not None:
            routes_N[whole[: len(sample.routes)]] = sample.routes
    return routes_N


def _sequences(
    places: Sequence[np.ndarray], shared: Sequence[int], device: torch.device, context: ContextRank, tokens: int
) -> PackedSequences:
    lengths = [len(whole) for whole in places]
    bounds = (0, *np.cumsum(lengths).tolist())

    def packed_params(boundaries: Sequence[int], longest: int = max(lengths)) -> dict[str, Any]:
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=device)
        bounds_qkv = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
        return {"qkv_format": "thd", "max_seqlen_q": longest, "max_seqlen_kv": longest, **bounds_qkv}

    per_rank = tokens // context.ranks
    pack = PackedSequences(
        **packed_params((0, per_rank)),
        bounds=bounds,
        shared=tuple(shared),
        whole=PackedSeqParams(**packed_params(bounds)),
        context=context,
        first=context.rank * per_rank,
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
