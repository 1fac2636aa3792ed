"""Causal attention over packed sequences, some of which may hold a prefix in common.

Legend: N packed tokens, n of them on this context rank, X all with every sequence written out (see `PackedSequences`),
H local query heads, G local key/value heads, D head width; of a block: B sequences, L tokens of the longest, Q of them
asked for.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from roll_opd.megatron.batches import PackedSequences
from roll_opd.megatron.context import positions_here
from roll_opd.megatron.exact import VECTOR


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
        key_NGD, value_NGD = (_of_all_ranks(tensor, packed_seq_params) for tensor in (key_nGD, value_nGD))
        pieces, places = [], []
        for read_BL, asked_BQ, answered_BQ, mask in _blocks(packed_seq_params, self.MAX_PADDING, query_nHD.device):
            q, k, v = _rows(query_nHD, asked_BQ), _rows(key_NGD, read_BL), _rows(value_NGD, read_BL)
            if q.device.type == "cpu":  # where the backward pass of bf16 takes eight times that of f32
                q, k, v = q.float(), k.float(), v.float()
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
            pieces.append(out.transpose(1, 2)[answered_BQ].to(query_nHD.dtype))
            places.append(asked_BQ[answered_BQ])
        out_nHD = torch.empty_like(query_nHD).index_copy(0, torch.cat(places), torch.cat(pieces))
        return out_nHD.flatten(1)


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


def _blocks(
    pack: PackedSequences, max_padding: float, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield blocks of rows of similar length: what is read [B, L], as places in the pack, and which of n ask [B, Q].

    With them, which of those ask in earnest, bool [B, Q], and a mask bool [B, 1, Q, L], None where the usual causal one
    will do. What does not ask in earnest is padding, or a prefix of another's: a row that shares up to half of its
    tokens asks for all, since a causal mask halves the work and a mask tensor does not.
    """
    lengths = [end - start for start, end in itertools.pairwise(pack.bounds)]
    cut = pack.context.ranks > 1
    for masked in (False, True):
        rows = [row for row, length in enumerate(lengths) if (cut or 2 * pack.shared[row] > length) is masked]
        for block in blocks_of_similar_length(lengths, rows, max_padding):
            starts, shared, sizes = torch.tensor(
                [[pack.bounds[row], pack.shared[row], lengths[row]] for row in block], device=device
            ).T[:, :, None]
            offsets_BL, real_BL = _padded_offsets(sizes)
            read_BL = _places(pack, starts + offsets_BL)
            if not masked:
                yield read_BL, read_BL, real_BL & (offsets_BL >= shared), None
                continue
            own = sizes - shared
            offsets_BQ, answered_BQ = _padded_offsets(own // pack.context.ranks)
            position_BQ = shared + positions_here(offsets_BQ, own, pack.context)
            mask_BQL = torch.arange(read_BL.size(1), device=device) <= position_BQ[:, :, None]
            asked_BQ = torch.where(answered_BQ, _places(pack, starts + position_BQ) - pack.first, 0)
            yield read_BL, asked_BQ, answered_BQ, mask_BQL[:, None]


def blocks_of_similar_length(lengths: Sequence[int], rows: Sequence[int], max_padding: float) -> list[list[int]]:
    """Group row numbers, longest first, so that no block's padded size exceeds `max_padding` × its tokens."""
    blocks: list[list[int]] = []
    tokens = longest = 0
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if lengths[row] == 0:
            continue
        if blocks and longest * (len(blocks[-1]) + 1) <= max_padding * (tokens + lengths[row]):
            blocks[-1].append(row)
            tokens += lengths[row]
        else:
            blocks.append([row])
            tokens = longest = lengths[row]
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
