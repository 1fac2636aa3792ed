"""Causal attention over packs with shared prefixes.

This module has `PackedAttention` and an adapter for Transformer Engine's attention. On GPUs `PackedAttention` calls
flash attention if the kernel supports the tensors (see `flash_kernels`).

Legend: N packed tokens, n of them on this context rank, X tokens of the expanded sequences (see `PackedSequences`), H
local query heads, G local key/value heads, D head width. In a block: B sequences, L keys and Q queries per sequence.

Causal attention on materialised scores, with sinks or capped scores, which torch's fused kernels do not support.

A sink (gpt-oss) is a learned score per query head. The softmax adds exp(sink) to its denominator, so the weights of a
query sum to less than 1. With context parallelism, the sink of a query is still added only once, because all keys of a
query are on one rank.

A cap (Gemma 2) turns a score s into cap · tanh(s / cap).

Legend: B sequences, H query heads, G key/value heads, R = H / G, Q queries, C of them in a chunk, L keys, D head width,
W value width.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from roll_opd.megatron.deterministic_ops import VECTOR
from roll_opd.megatron.flash_kernels import flash_attention, uses_flash_attention
from roll_opd.megatron.packing import PackedSequences
from roll_opd.models.families.family_definition import Pieces
from roll_opd.models.memory import CHUNK_BYTES

Seen = Callable[[slice], Tensor]  # slice of queries -> mask of the keys that they see, bool [B or 1, 1, C, L]


def attention_by_scores(
    query_BHQD: Tensor,
    key_BGLD: Tensor,
    value_BGLW: Tensor,
    seen: Seen,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the attention output, [B, H, Q, W], in the dtype of `query_BHQD`.

    Every query must see at least one key.

    Queries are computed in chunks. The f32 scores of a chunk fit into `CHUNK_BYTES` of the device. The backward pass
    recomputes the scores.
    """
    rows, heads, queries = query_BHQD.shape[:3]
    each = 4 * rows * heads * key_BGLD.size(2)  # bytes of the scores of one query position
    step = max(1, CHUNK_BYTES[query_BHQD.device.type] // each)

    def attend(query_BHCD: Tensor, key_BGLD: Tensor, value_BGLW: Tensor, chunk: slice) -> Tensor:
        return _attend(query_BHCD, key_BGLD, value_BGLW, seen(chunk), sinks_H, scale, cap)

    found = []
    for start in range(0, queries, step):
        chunk = slice(start, min(start + step, queries))
        given = query_BHQD[:, :, chunk], key_BGLD, value_BGLW, chunk
        if torch.is_grad_enabled():
            found.append(checkpoint(attend, *given, use_reentrant=False, preserve_rng_state=False))
        else:
            found.append(attend(*given))
    return torch.cat(found, 2)


def _attend(
    query_BHCD: Tensor,
    key_BGLD: Tensor,
    value_BGLW: Tensor,
    seen_B1CL: Tensor,
    sinks_H: Tensor | None,
    scale: float,
    cap: float | None,
) -> Tensor:
    groups = key_BGLD.size(1)
    query_BGRCD = query_BHCD.unflatten(1, (groups, -1))
    scores = (query_BGRCD @ key_BGLD[:, :, None].transpose(-1, -2)).float() * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~seen_B1CL[:, :, None], -torch.inf)
    normaliser = scores.logsumexp(-1, keepdim=True)
    if sinks_H is not None:
        normaliser = torch.logaddexp(normaliser, sinks_H.float().view(groups, -1, 1, 1))
    weights = (scores - normaliser).exp().to(value_BGLW.dtype)
    return (weights @ value_BGLW[:, :, None]).flatten(1, 2)


class PackedAttention(torch.nn.Module):
    """Attention over packs. It uses flash attention if possible, else `scaled_dot_product_attention` (on every device).

    Layers with sinks or capped scores use `attention_by_scores`, because neither kernel supports them.

    Without flash attention, sequences are the rows of right-padded blocks. Most rows need no mask tensor, because under
    a causal mask a query never sees the padding to its right. A mask tensor is needed for rows in which some tokens
    have a key but no query:

    - rows with a shared prefix;
    - rows that are split over context ranks, because the keys and values of these rows are gathered.

    Rows are sorted by length and grouped into blocks, so that one long sequence does not add padding to all other
    sequences. The padded size of a block is at most `MAX_PADDING` times its real size.
    """

    MAX_PADDING = 2.0  # largest ratio of padded to real tokens in a block

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError("attention_dropout must be 0: log-probs under dropout are not defined")
        assert config.kv_channels is not None  # Megatron fills it in
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        pieces = getattr(config, "pieces", Pieces())
        self.window = pieces.windows[layer_number - 1] if pieces.windows else 0  # keys that a query sees; 0: all
        self.sinks = self._make_sinks(config) if pieces.sinks else None
        self.cap = pieces.score_cap

    def _make_sinks(self, config: TransformerConfig) -> torch.nn.Parameter:
        """Return a parameter with one sink score per local head."""
        heads, device = config.num_attention_heads // config.tensor_model_parallel_size, torch.cuda.current_device()
        sinks_H = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(sinks_H, is_parallel=True, dim=0, stride=1)
        return sinks_H

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's checkpoint description of the sinks. Each tensor rank has the sinks of its own heads."""
        own = dict(self.named_parameters())
        return make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets)

    def forward(
        self,
        query_nHD: Tensor,
        key_nGD: Tensor,
        value_nGD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Return the attention outputs of the sequences in `packed_seq_params`, [n, H·D]."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params: every batch is packed here")
        needs_scores = self.sinks is not None or self.cap is not None  # no kernel of torch has sinks or caps
        if not needs_scores and uses_flash_attention(query_nHD, value_nGD, packed_seq_params):
            qkv = query_nHD, key_nGD, value_nGD
            return flash_attention(*qkv, packed_seq_params, self.scale, self.window).flatten(1)
        key_NGD, value_NGD = (_gather_context(tensor, packed_seq_params) for tensor in (key_nGD, value_nGD))
        pieces, places = [], []
        if packed_seq_params.blocks is None:  # all layers share the blocks: creating them synchronises with the GPU
            packed_seq_params.blocks = tuple(_blocks(packed_seq_params, self.MAX_PADDING, query_nHD.device))
        for block in packed_seq_params.blocks:
            attend: Any = self._attend
            if needs_scores:
                attend = self._attend_by_scores
            elif block.is_masked(self.window):  # recompute in backward: no layer keeps its masks and rows
                attend = partial(checkpoint, self._attend, use_reentrant=False, preserve_rng_state=False)
            pieces.append(attend(query_nHD, key_NGD, value_NGD, block))
            places.append(block.places_A)
        out_nHD = query_nHD.new_empty(*query_nHD.shape[:2], value_nGD.size(-1))
        out_nHD = out_nHD.index_copy(0, torch.cat(places), torch.cat(pieces))
        return out_nHD.flatten(1)

    def _attend(self, query_nHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, block: "_Block") -> Tensor:
        """Return the outputs of the real queries of a block, [A, H, D]."""
        q = _rows(query_nHD, block.query_BQ)
        k, v = _rows(key_NGD, block.key_BL), _rows(value_NGD, block.key_BL)
        if q.device.type == "cpu":  # on CPUs the backward pass takes eight times longer in bf16 than in f32
            q, k, v = q.float(), k.float(), v.float()
        mask, width = block.mask(self.window), v.size(-1)
        if width != q.size(-1):  # kernels without materialised scores need equal widths; padding with zeros is exact
            q, k, v = (F.pad(x, (0, max(width, q.size(-1)) - x.size(-1))) for x in (q, k, v))
        if q.is_cuda and (mask is not None or q.dtype is torch.float32):
            # the kernels that support masks or f32 without materialising scores need equal numbers of heads
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        grouped = q.size(1) != k.size(1)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return out[..., :width].transpose(1, 2)[block.real_A].to(query_nHD.dtype)

    def _attend_by_scores(self, query_nHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, block: "_Block") -> Tensor:
        """Return the same outputs as `_attend`, for layers with sinks in the softmax or with capped scores."""
        q, k, v = _rows(query_nHD, block.query_BQ), _rows(key_NGD, block.key_BL), _rows(value_NGD, block.key_BL)
        if q.device.type == "cpu":
            q, k, v = q.float(), k.float(), v.float()
        seen = partial(block.seen, self.window)
        out = attention_by_scores(q, k, v, seen, scale=self.scale, sinks_H=self.sinks, cap=self.cap)
        return out.transpose(1, 2)[block.real_A].to(query_nHD.dtype)


def with_expanded_packs(attention: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a subclass of `attention` that expands shared prefixes.

    It is needed for attention that requires contiguous sequences.
    """

    class ExpandedAttention(attention):  # type: ignore[misc, valid-type]
        def forward(
            self,
            query_NHD: Tensor,
            key_NGD: Tensor,
            value_NGD: Tensor,
            attention_mask: Tensor | None,
            *args: Any,
            packed_seq_params: PackedSequences,
            **options: Any,
        ) -> Tensor:
            pack, qkv = packed_seq_params, [query_NHD, key_NGD, value_NGD]
            if pack.context.ranks > 1:  # `attention` gathers all chunks
                return super().forward(*qkv, attention_mask, *args, packed_seq_params=pack.whole, **options)
            if pack.places_X is not None:
                qkv = [tensor.index_select(0, pack.places_X) for tensor in qkv]
            out = super().forward(*qkv, attention_mask, *args, packed_seq_params=pack.whole, **options)
            return out if pack.cells_N is None else out.index_select(0, pack.cells_N)

    return ExpandedAttention


@dataclass(frozen=True)
class _Block:
    """Rows of similar length.

    - `key_BL`: indices of the keys among the N tokens of the pack.
    - `query_BQ`: indices of the queries among the n tokens of this context rank.

    A is the number of real queries. The other entries of `query_BQ` are padding, or belong to a shared prefix.
    """

    key_BL: Tensor
    query_BQ: Tensor
    real_A: tuple[Tensor, Tensor]  # int64, rows and columns of the real queries
    places_A: Tensor  # int64, indices of the real queries among the n tokens
    position_BQ: Tensor | None = None  # position of each query in its sequence; None: Q = L and query i is token i

    def is_masked(self, window: int) -> bool:
        """Whether the block needs a mask tensor.

        `window` is the largest number of keys that a query sees. 0 means that the number of keys is not limited.
        """
        return self.position_BQ is not None or 0 < window < self.key_BL.size(1)

    def mask(self, window: int = 0) -> Tensor | None:
        """Return the attention mask, or None if attention can use a plain causal mask.

        The mask is bool [B, 1, Q, L] or [1, 1, Q, L].
        """
        return self.seen(window, slice(None)) if self.is_masked(window) else None

    def seen(self, window: int, queries: slice) -> Tensor:
        """Return the mask of `queries`. The mask is true for each key that a query sees.

        The mask is bool [B, 1, Q, L] or [1, 1, Q, L].
        """
        positions_L = torch.arange(self.key_BL.size(1), device=self.key_BL.device)
        position_BQ1 = (positions_L[None] if self.position_BQ is None else self.position_BQ)[:, queries, None]
        seen_BQL = positions_L <= position_BQ1
        if window:
            seen_BQL &= positions_L > position_BQ1 - window
        return seen_BQL[:, None]


@dataclass(frozen=True)
class _QuerySpan:
    """Consecutive queries of this rank, all of one sequence.

    - `start`: index of the first token of the sequence among the tokens of the expanded sequences.
    - `first`: position of the first query in the sequence.
    - `count`: number of queries.
    """

    start: int
    first: int
    count: int

    @property
    def keys(self) -> int:
        """Number of keys: the tokens of the sequence up to the last query."""
        return self.first + self.count


def _query_spans(pack: PackedSequences) -> Iterator[_QuerySpan]:
    """Yield the queries of each sequence.

    The queries of a sequence are its unshared tokens. With context parallelism, they are only the two chunks of the
    unshared tokens that belong to this context rank.
    """
    ranks, rank = pack.context.ranks, pack.context.rank
    for (start, end), shared in zip(itertools.pairwise(pack.bounds), pack.shared, strict=True):
        own = end - start - shared
        if ranks == 1:
            yield _QuerySpan(start, shared, own)
            continue
        chunk = own // (2 * ranks)
        for number in (rank, 2 * ranks - 1 - rank):
            yield _QuerySpan(start, shared + number * chunk, chunk)


def _blocks(pack: PackedSequences, max_padding: float, device: torch.device) -> Iterator[_Block]:
    """Yield blocks that together contain all queries of this rank.

    `max_padding` limits the padding of each block.

    Without context parallelism, a span is computed together with its prefix as plain causal attention if the prefix has
    at most half of the keys. This needs less work than attention with a mask tensor: plain causal attention skips half
    of the work, and attention with a mask tensor skips none.
    """
    spans = [one for one in _query_spans(pack) if one.count]
    plain: list[_QuerySpan] = []
    masked: list[_QuerySpan] = []
    for one in spans:
        is_plain = one.first == 0 or (pack.context.ranks == 1 and 2 * one.first <= one.keys)
        (plain if is_plain else masked).append(one)
    for block in blocks_of_similar_size([(one.keys,) for one in plain], max_padding):
        starts, firsts, keys, _ = _span_columns([plain[number] for number in block], device)
        offsets_BL, real_BL = _padded_offsets(keys)
        key_BL = _places(pack, starts + offsets_BL)
        query_BL = real_BL & (offsets_BL >= firsts)
        yield _block(key_BL, torch.where(real_BL, key_BL - pack.first, 0), query_BL)
    for block in blocks_of_similar_size([(one.count, one.keys) for one in masked], max_padding):
        starts, firsts, keys, counts = _span_columns([masked[number] for number in block], device)
        key_BL = _places(pack, starts + _padded_offsets(keys)[0])
        offsets_BQ, real_BQ = _padded_offsets(counts)
        position_BQ = firsts + offsets_BQ
        query_BQ = torch.where(real_BQ, _places(pack, starts + position_BQ) - pack.first, 0)
        yield _block(key_BL, query_BQ, real_BQ, position_BQ)


def _block(key_BL: Tensor, query_BQ: Tensor, real_BQ: Tensor, position_BQ: Tensor | None = None) -> _Block:
    """Return the block. The mask `real_BQ`, bool, marks the real queries of the block."""
    rows_A, columns_A = real_BQ.nonzero(as_tuple=True)
    return _Block(key_BL, query_BQ, (rows_A, columns_A), query_BQ[rows_A, columns_A], position_BQ)


def _span_columns(block: Sequence[_QuerySpan], device: torch.device) -> tuple[Tensor, ...]:
    """Return (starts, firsts, keys, counts) of the spans, each as a tensor [B, 1]."""
    rows = [[one.start, one.first, one.keys, one.count] for one in block]
    return tuple(torch.tensor(rows, device=device).T[:, :, None])


def blocks_of_similar_size(sizes: Sequence[tuple[int, ...]], max_padding: float) -> list[list[int]]:
    """Group the indices of `sizes` into blocks of similar size, starting with the largest size.

    In each dimension of `sizes`, all members of a block are padded to the size of the largest member. The padded size
    of a block is at most `max_padding` times the sum of the sizes of its members.
    """
    blocks: list[list[int]] = []
    largest: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    for number in sorted(range(len(sizes)), key=lambda number: tuple(-size for size in sizes[number])):
        together = tuple(map(max, largest, sizes[number]))
        summed = tuple(a + b for a, b in zip(sums, sizes[number], strict=False))
        many = len(blocks[-1]) + 1 if blocks else 1
        if blocks and all(size * many <= max_padding * total for size, total in zip(together, summed, strict=True)):
            blocks[-1].append(number)
            largest, sums = together, summed
        else:
            blocks.append([number])
            largest = sums = sizes[number]
    return blocks


def _padded_offsets(sizes_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return (offsets, real) for a padded block.

    - `offsets`: offset of each token in its row, [B, L], 0 for padding.
    - `real`: mask of the tokens that are not padding, bool [B, L].
    """
    longest = -(-int(sizes_B1.max()) // VECTOR) * VECTOR
    offsets = torch.arange(longest, device=sizes_B1.device)
    real_BL = offsets < sizes_B1
    return torch.where(real_BL, offsets, 0), real_BL


def _places(pack: PackedSequences, cells_BL: Tensor) -> Tensor:
    """Return, for each token of the expanded sequences, its position in the pack."""
    return cells_BL if pack.places_X is None else pack.places_X[cells_BL]


def _gather_context(tensor_nGD: Tensor, pack: PackedSequences) -> Tensor:
    """Gather [n, G, D] from all context ranks into [N, G, D]; the backward pass sums the gradient over the ranks."""
    if pack.context.ranks == 1:
        return tensor_nGD
    return gather_from_sequence_parallel_region(tensor_nGD, group=pack.context.group)


def _rows(packed: Tensor, places_BL: Tensor) -> Tensor:
    """Gather the rows of a block from the pack: [N, heads, D] -> [B, heads, L, D]."""
    return packed.index_select(0, places_BL.flatten()).view(*places_BL.shape, *packed.shape[1:]).transpose(1, 2)
