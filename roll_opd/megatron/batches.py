"""A packed micro-batch: several sequences end to end, and the arrays that belong to their scored tokens.

Legend: N packed tokens, M scored tokens (every token after a prompt), B sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from roll_opd.data.tensors import as_tensor


@dataclass(frozen=True)
class Sample:
    """One sequence for the engine: T tokens, P of them prompt, and arrays by name."""

    tokens: np.ndarray  # int64 [T]
    prompt_length: int  # P >= 1
    columns: Mapping[str, np.ndarray]  # each [T-P] or [T-P, K]


@dataclass(frozen=True)
class PackedBatch:
    """Tensors of one micro-batch on one device."""

    tokens_N: Tensor  # int64
    positions_N: Tensor  # int64, from 0 in each sequence
    scored_M: Tensor  # int64, places in the pack
    lengths: tuple[int, ...]  # M_b, scored tokens of each sequence
    packed_seq_params: PackedSeqParams
    columns: dict[str, Tensor]  # each [M] or [M, K]


def pack(samples: Sequence[Sample], device: torch.device, multiple: int) -> PackedBatch:
    """Put `samples` end to end, and pad the pack to a multiple of `multiple` with a sequence that is not scored."""
    lengths = [len(sample.tokens) for sample in samples]
    padding = -sum(lengths) % multiple
    tokens = [sample.tokens for sample in samples] + [np.zeros(padding, np.int64)]
    segments = lengths + ([padding] if padding else [])
    starts = np.concatenate([[0], np.cumsum(segments)])
    scored = [
        np.arange(start + sample.prompt_length, start + len(sample.tokens))
        for start, sample in zip(starts, samples, strict=False)
    ]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    return PackedBatch(
        tokens_N=_tensor(tokens, device),
        positions_N=_tensor([np.arange(length) for length in segments], device),
        scored_M=_tensor(scored, device),
        lengths=tuple(len(places) for places in scored),
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(segments),
            max_seqlen_kv=max(segments),
        ),
        columns={name: _tensor([sample.columns[name] for sample in samples], device) for name in samples[0].columns},
    )


def _tensor(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return as_tensor(np.concatenate(arrays)).to(device)
