"""Torch's flash attention over a pack in place: no rows are padded, gathered or scattered.

Queries are each sequence's own tokens, which lie side by side in the pack. Keys are those of the whole sequence; only
where sequences share a prefix are they gathered. The kernel's causal mask is aligned at the end of both.

Legend: N packed tokens, X of the same sequences written out, H query heads, G key/value heads, D head width.
"""

from functools import cache

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from roll_opd.megatron.batches import PackedSequences

CAPABILITY = (8, 0)  # of the devices that have the kernel
WIDEST = 256


def takes(query_NHD: Tensor, value_NGD: Tensor, pack: PackedSequences) -> bool:
    """Whether the kernel exists for these tensors; it needs whole sequences on this rank."""
    width = query_NHD.size(-1)
    return (
        query_NHD.is_cuda
        and query_NHD.dtype in (torch.bfloat16, torch.float16)
        and value_NGD.size(-1) == width
        and width % 8 == 0
        and width <= WIDEST
        and pack.context.ranks == 1
        and _has_kernel(query_NHD.device)
    )


@cache
def _has_kernel(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and (
        torch.cuda.get_device_capability(device) >= CAPABILITY
    )


def attended(query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, pack: PackedSequences, scale: float) -> Tensor:
    """Return attention's output [N, H, D], with gradient."""
    own, whole = pack.own, pack.whole
    assert own is not None and whole is not None
    if pack.places_X is not None:
        key_NGD, value_NGD = (tensor.index_select(0, pack.places_X) for tensor in (key_NGD, value_NGD))
    return _kernel(query_NHD, key_NGD, value_NGD, own, whole, scale)


def _kernel(
    query_NHD: Tensor, key_XGD: Tensor, value_XGD: Tensor, own: PackedSeqParams, whole: PackedSeqParams, scale: float
) -> Tensor:
    """Return [N, H, D]; `own` bounds each sequence's queries, `whole` its keys; the last of both stand at one place."""
    lengths = own.cu_seqlens_q, whole.cu_seqlens_kv, own.max_seqlen_q, whole.max_seqlen_kv
    no_dropout, is_causal, returns_mask = 0.0, True, False
    settings = (*lengths, no_dropout, is_causal, returns_mask)
    out_NHD: Tensor = torch.ops.aten._flash_attention_forward(query_NHD, key_XGD, value_XGD, *settings, scale=scale)[0]
    return out_NHD
