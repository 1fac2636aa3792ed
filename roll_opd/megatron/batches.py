"""A packed micro-batch: several sequences end to end, and the arrays that belong to their scored tokens.

Sequences with the same prompt may hold it once: the layers then read its tokens once, for all of them.

Legend: N packed tokens, X tokens of the same sequences written out, M scored tokens (every token after a prompt),
B sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from roll_opd.data.tensors import as_tensor

SHORTEST_SHARE = 1 / 8  # of a sequence, that a shared prompt should be


@dataclass(frozen=True)
class Sample:
    """One sequence for the engine: T tokens, P of them prompt, and arrays by name."""

    tokens: np.ndarray  # int64 [T]
    prompt_length: int  # P >= 1
    columns: Mapping[str, np.ndarray]  # each [T-P] or [T-P, K]

    @property
    def prompt_to_share(self) -> bytes:
        """The prompt, as bytes; empty where to share it saves less than it costs attention, which needs a mask then."""
        worth_it = SHORTEST_SHARE * len(self.tokens) <= self.prompt_length
        return self.tokens[: self.prompt_length].tobytes() if worth_it else b""


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


@dataclass(frozen=True)
class PackedBatch:
    """Tensors of one micro-batch on one device."""

    tokens_N: Tensor  # int64
    positions_N: Tensor  # int64, from 0 in each sequence
    scored_M: Tensor  # int64, places in the pack
    before_M: Tensor  # int64, place of the token before each scored one
    lengths: tuple[int, ...]  # M_b, scored tokens of each sequence
    sequences: PackedSequences
    columns: dict[str, Tensor]  # each [M] or [M, K]


def pack(samples: Sequence[Sample], device: torch.device, multiple: int, *, share_prompts: bool = False) -> PackedBatch:
    """Put `samples` end to end, and pad the pack to a multiple of `multiple` with a sequence that is not scored.

    With `share_prompts`, a prompt that an earlier sample has too is not repeated, where that pays.
    """
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    places: list[np.ndarray] = []  # of every token of each sequence
    shared: list[int] = []
    prompts: dict[bytes, np.ndarray] = {}
    end = 0

    def add(sequence: np.ndarray, prefix: np.ndarray) -> np.ndarray:
        nonlocal end
        own = np.arange(end, end + len(sequence) - len(prefix))
        end += len(own)
        tokens.append(sequence[len(prefix) :])
        positions.append(np.arange(len(prefix), len(sequence)))
        places.append(np.concatenate([prefix, own]))
        shared.append(len(prefix))
        return places[-1]

    nothing = np.zeros(0, np.int64)
    for sample in samples:
        prompt = sample.prompt_to_share if share_prompts else b""
        whole = add(sample.tokens, prompts.get(prompt, nothing))
        if prompt:
            prompts.setdefault(prompt, whole[: sample.prompt_length])
    if padding := -end % multiple:
        add(np.zeros(padding, np.int64), nothing)

    scored = [whole[sample.prompt_length :] for whole, sample in zip(places, samples, strict=False)]
    before = [whole[sample.prompt_length - 1 : -1] for whole, sample in zip(places, samples, strict=False)]
    return PackedBatch(
        tokens_N=_tensor(tokens, device),
        positions_N=_tensor(positions, device),
        scored_M=_tensor(scored, device),
        before_M=_tensor(before, device),
        lengths=tuple(len(own) for own in scored),
        sequences=_sequences(places, shared, device),
        columns={name: _tensor([sample.columns[name] for sample in samples], device) for name in samples[0].columns},
    )


def _sequences(places: Sequence[np.ndarray], shared: Sequence[int], device: torch.device) -> PackedSequences:
    lengths = [len(whole) for whole in places]
    bounds = (0, *np.cumsum(lengths).tolist())

    def told(boundaries: Sequence[int]) -> dict[str, Any]:
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=device)
        of = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
        return {"qkv_format": "thd", "max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths), **of}

    pack = PackedSequences(
        **told((0, bounds[-1] - sum(shared))),
        bounds=bounds,
        shared=tuple(shared),
        whole=PackedSeqParams(**told(bounds)),
    )
    if any(shared):
        first_cells = np.unique(np.concatenate(places), return_index=True)[1]
        pack.places_X, pack.cells_N = _tensor(places, device), _tensor([first_cells], device)
    return pack


def _tensor(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return as_tensor(np.concatenate(arrays)).to(device)
