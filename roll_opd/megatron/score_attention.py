"""Causal attention on materialised scores, with sinks or capped scores, which torch's fused kernels do not support.

A sink (gpt-oss) is a learned score per query head. The softmax adds exp(sink) to its denominator, so the weights of a
query sum to less than 1. With context parallelism, the sink of a query is still added only once, because all keys of a
query are on one rank.

A cap (Gemma 2) turns a score s into cap · tanh(s / cap).

Legend: B sequences, H query heads, G key/value heads, R = H / G, Q queries, C of them in a chunk, L keys, D head width,
W value width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
