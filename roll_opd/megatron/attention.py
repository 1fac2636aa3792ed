"""Causal attention over packed sequences, some of which may hold a prefix in common.

Legend: N packed tokens, n of them on this context rank, X all with every sequence written out (see `PackedSequences`),
H local query heads, G local key/value heads, D head width; of a block: B sequences, L tokens of the longest, Q of them
asked for.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from roll_opd.megatron.batches import PackedSequences
from roll_opd.megatron.deterministic_ops import VECTOR


class PackedAttention(torch.nn.Module):
    """Attention with `scaled_dot_product_attention`, which exists on every device.

    Sequences are laid out as the rows of one right-padded batch: under a causal mask a real query never sees the
    padding behind it, so only rows that do not ask for all of their tokens need a mask tensor: those whose prefix is
    another's, and those of which other context ranks have a part. Keys and values are gathered from these. Rows are
    sorted by length and cut into blocks whose padding is bounded, so that one long sequence does not inflate the rest.
    """

    MAX_PADDING = 2.0  # a block may hold at most so many times its real tokens

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
            raise ValueError("attention_dropout must be 0: the log-probs of a model under dropout are not defined")
        assert config.kv_channels is not None  # Megatron fills it in
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

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
        """Return [n, H·D]; `packed_seq_params` says which tokens are a sequence."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params: every batch is packed here")
        if uses_flash_attention(query_nHD, value_nGD, packed_seq_params):
            return flash_attention(query_nHD, key_nGD, value_nGD, packed_seq_params, self.scale).flatten(1)
        key_NGD, value_NGD = (_of_all_ranks(tensor, packed_seq_params) for tensor in (key_nGD, value_nGD))
        pieces, places = [], []
        if packed_seq_params.blocks is None:  # the same for all layers: to make them, a GPU has to be waited for
            packed_seq_params.blocks = tuple(_blocks(packed_seq_params, self.MAX_PADDING, query_nHD.device))
        for block in packed_seq_params.blocks:
            attend: Any = self._attend
            if block.position_BQ is not None:  # masks and rows would be kept for the backward pass, in every layer
                attend = partial(checkpoint, self._attend, use_reentrant=False, preserve_rng_state=False)
            pieces.append(attend(query_nHD, key_NGD, value_NGD, block))
            places.append(block.places_A)
        out_nHD = query_nHD.new_empty(*query_nHD.shape[:2], value_nGD.size(-1))
        out_nHD = out_nHD.index_copy(0, torch.cat(places), torch.cat(pieces))
        return out_nHD.flatten(1)

    def _attend(self, query_nHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, block: "_Block") -> Tensor:
        """Return [A, H, D], of the A tokens that a block asks for in earnest."""
        q = _rows(query_nHD, block.asked_BQ)
        k, v = _rows(key_NGD, block.read_BL), _rows(value_NGD, block.read_BL)
        if q.device.type == "cpu":  # where the backward pass of bf16 takes eight times that of f32
            q, k, v = q.float(), k.float(), v.float()
        mask, width = block.mask(), v.size(-1)
        if width != q.size(-1):  # there are only kernels that write out all scores: zeros change nothing
            q, k, v = (F.pad(x, (0, max(width, q.size(-1)) - x.size(-1))) for x in (q, k, v))
        if q.is_cuda and (mask is not None or q.dtype is torch.float32):
            # of the kernels that write out no scores only flash attention knows groups, and it takes neither of these
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        grouped = q.size(1) != k.size(1)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return out[..., :width].transpose(1, 2)[block.answered_A].to(query_nHD.dtype)


def written_out(attention: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return `attention`, which must find all tokens of a sequence side by side, for packs that share prefixes."""

    class WrittenOut(attention):  # type: ignore[misc, valid-type]
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
            if pack.context.ranks > 1:  # it gathers by itself, and finds the pieces by the lengths of their sequences
                return super().forward(*qkv, attention_mask, *args, packed_seq_params=pack.whole, **options)
            if pack.places_X is not None:
                qkv = [tensor.index_select(0, pack.places_X) for tensor in qkv]
            out = super().forward(*qkv, attention_mask, *args, packed_seq_params=pack.whole, **options)
            return out if pack.cells_N is None else out.index_select(0, pack.cells_N)

    return WrittenOut


@dataclass(frozen=True)
class _Block:
    """Rows of similar length: what is read [B, L], as places in the pack, and which of n ask [B, Q].

    Of those, A ask in earnest; the rest is padding, or a prefix of another's.
    """

    read_BL: Tensor
    asked_BQ: Tensor
    answered_A: tuple[Tensor, Tensor]  # int64, row and place in the row of those that ask in earnest
    places_A: Tensor  # int64, which of n they are
    position_BQ: Tensor | None = None  # of what asks, in its sequence; None: all that is read asks, in order

    def mask(self) -> Tensor | None:
        """Return what may be read, bool [B, 1, Q, L]; None where the usual causal mask will do."""
        if self.position_BQ is None:
            return None
        positions_L = torch.arange(self.read_BL.size(1), device=self.read_BL.device)
        return (positions_L <= self.position_BQ[:, :, None])[:, None]


@dataclass(frozen=True)
class _QuerySpan:
    """Consecutive tokens of the sequence at cell `start` that this rank has: `count` from position `first`."""

    start: int
    first: int
    count: int

    @property
    def read(self) -> int:
        """How much of the sequence they attend to."""
        return self.first + self.count


def _asked(pack: PackedSequences) -> Iterator[_QuerySpan]:
    """Yield what is asked for of each sequence: all that is not another's, or this context rank's two chunks of it."""
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
    """Yield all that is asked for, in blocks whose padding is bounded.

    What begins in the first half of all that it reads is asked for from the beginning, where that is at hand: a causal
    mask halves the work, and a mask tensor does not.
    """
    asked = [one for one in _asked(pack) if one.count]
    plain: list[_QuerySpan] = []
    masked: list[_QuerySpan] = []
    for one in asked:
        is_plain = one.first == 0 or (pack.context.ranks == 1 and 2 * one.first <= one.read)
        (plain if is_plain else masked).append(one)
    for block in blocks_of_similar_size([(one.read,) for one in plain], max_padding):
        starts, firsts, reads, _ = _columns_of([plain[number] for number in block], device)
        offsets_BL, real_BL = _padded_offsets(reads)
        read_BL = _places(pack, starts + offsets_BL)
        answered_BL = real_BL & (offsets_BL >= firsts)
        yield _block(read_BL, torch.where(real_BL, read_BL - pack.first, 0), answered_BL)
    for block in blocks_of_similar_size([(one.count, one.read) for one in masked], max_padding):
        starts, firsts, reads, counts = _columns_of([masked[number] for number in block], device)
        read_BL = _places(pack, starts + _padded_offsets(reads)[0])
        offsets_BQ, answered_BQ = _padded_offsets(counts)
        position_BQ = firsts + offsets_BQ
        asked_BQ = torch.where(answered_BQ, _places(pack, starts + position_BQ) - pack.first, 0)
        yield _block(read_BL, asked_BQ, answered_BQ, position_BQ)


def _block(read_BL: Tensor, asked_BQ: Tensor, answered_BQ: Tensor, position_BQ: Tensor | None = None) -> _Block:
    """Return a block of which `answered_BQ`, bool, says what asks in earnest."""
    rows_A, columns_A = answered_BQ.nonzero(as_tuple=True)
    return _Block(read_BL, asked_BQ, (rows_A, columns_A), asked_BQ[rows_A, columns_A], position_BQ)


def _columns_of(block: Sequence[_QuerySpan], device: torch.device) -> tuple[Tensor, ...]:
    """Return starts, firsts, what is read and counts, each [B, 1]."""
    rows = [[one.start, one.first, one.read, one.count] for one in block]
    return tuple(torch.tensor(rows, device=device).T[:, :, None])


def blocks_of_similar_size(sizes: Sequence[tuple[int, ...]], max_padding: float) -> list[list[int]]:
    """Group numbers of `sizes`, largest first, so that no block's padded size exceeds `max_padding` × its own, in each.

    A block is as large as its largest member in each of the sizes.
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
    """Return the cells of a padded block of rows, each counted from its row's first, [B, L], and which are real."""
    longest = -(-int(sizes_B1.max()) // VECTOR) * VECTOR
    offsets = torch.arange(longest, device=sizes_B1.device)
    real_BL = offsets < sizes_B1
    return torch.where(real_BL, offsets, 0), real_BL


def _places(pack: PackedSequences, cells_BL: Tensor) -> Tensor:
    """Return the places in the pack of cells of the sequences written out."""
    return cells_BL if pack.places_X is None else pack.places_X[cells_BL]


def _of_all_ranks(tensor_nGD: Tensor, pack: PackedSequences) -> Tensor:
    """[n, G, D] -> [N, G, D]; the gradient is summed over the context ranks."""
    if pack.context.ranks == 1:
        return tensor_nGD
    return gather_from_sequence_parallel_region(tensor_nGD, group=pack.context.group)


def _rows(packed: Tensor, places_BL: Tensor) -> Tensor:
    """[N, heads, D] -> [B, heads, L, D]."""
    return packed.index_select(0, places_BL.flatten()).view(*places_BL.shape, *packed.shape[1:]).transpose(1, 2)


FLASH_CAPABILITY = (8, 0)  # of the devices that have the kernel
FLASH_MAX_HEAD_WIDTH = 256


def uses_flash_attention(query_NHD: Tensor, value_NGD: Tensor, pack: PackedSequences) -> bool:
    """Whether the kernel exists for these tensors; it needs whole sequences on this rank."""
    width = query_NHD.size(-1)
    return (
        query_NHD.is_cuda
        and query_NHD.dtype in (torch.bfloat16, torch.float16)
        and value_NGD.size(-1) == width
        and width % 8 == 0
        and width <= FLASH_MAX_HEAD_WIDTH
        and pack.context.ranks == 1
        and _has_flash_kernel(query_NHD.device)
    )


@cache
def _has_flash_kernel(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and (
        torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
    )


def flash_attention(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, pack: PackedSequences, scale: float
) -> Tensor:
    """Return attention's output [N, H, D], with gradient."""
    own, whole = pack.own, pack.whole
    assert own is not None and whole is not None
    if pack.places_X is not None:
        key_NGD, value_NGD = (tensor.index_select(0, pack.places_X) for tensor in (key_NGD, value_NGD))
    return _flash_kernel(query_NHD, key_NGD, value_NGD, own, whole, scale)


def _flash_kernel(
    query_NHD: Tensor, key_XGD: Tensor, value_XGD: Tensor, own: PackedSeqParams, whole: PackedSeqParams, scale: float
) -> Tensor:
    """Return [N, H, D]; `own` bounds each sequence's queries, `whole` its keys; the last of both stand at one place."""
    lengths = own.cu_seqlens_q, whole.cu_seqlens_kv, own.max_seqlen_q, whole.max_seqlen_kv
    no_dropout, is_causal, returns_mask = 0.0, True, False
    settings = (*lengths, no_dropout, is_causal, returns_mask)
    out_NHD: Tensor = torch.ops.aten._flash_attention_forward(query_NHD, key_XGD, value_XGD, *settings, scale=scale)[0]
    return out_NHD
