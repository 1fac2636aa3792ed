"""How per-token losses become one number: by a weight for each token, fixed before the batch is split.

A loss is then the weighted sum over its tokens, which is the same for any split into micro-batches, ranks or packs.

Legend: M scored tokens of all sequences, B sequences.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def token_weights(
    masks: Sequence[Tensor], mode: str, normaliser: float | None = None, parts: Sequence[Hashable] | None = None
) -> list[Tensor]:
    """Return f32 [M_b] for each sequence of the whole batch, 0 where its mask is False.

    Args:
        masks: bool [M_b] for each of the B sequences over all ranks.
        mode: token-mean (Σ loss / Σ tokens); seq-mean-token-sum (mean over sequences of their sums);
            seq-mean-token-mean (mean over sequences of their means; ROLL's default);
            seq-mean-token-sum-norm (Σ loss / `normaliser`; Dr. GRPO, arXiv 2503.20783).
        parts: which part of the batch each sequence belongs to; each part is averaged alone, and the means are added.

    Sequences without an action token count in no denominator.

    Raises:
        ValueError: for an unknown mode, or one that needs a normaliser and has none.
    """
    if parts is not None:
        weights: dict[int, Tensor] = {}
        for part in set(parts):
            members = [number for number, own in enumerate(parts) if own == part]
            weights |= zip(members, token_weights([masks[n] for n in members], mode, normaliser), strict=True)
        return [weights[number] for number in range(len(masks))]
    tokens = [int(mask.sum()) for mask in masks]
    sequences = max(sum(count > 0 for count in tokens), 1)
    if mode == "token-mean":
        scales = [1.0 / max(sum(tokens), 1)] * len(masks)
    elif mode == "seq-mean-token-sum":
        scales = [1.0 / sequences] * len(masks)
    elif mode == "seq-mean-token-mean":
        scales = [1.0 / (sequences * max(count, 1)) for count in tokens]
    elif mode == "seq-mean-token-sum-norm":
        if not normaliser:
            raise ValueError("loss_agg_mode seq-mean-token-sum-norm needs a normaliser greater than 0")
        scales = [1.0 / normaliser] * len(masks)
    else:
        raise ValueError(f"loss_agg_mode {mode!r} is unknown; use one of {', '.join(MODES)}")
    return [mask.to(torch.float32) * scale for mask, scale in zip(masks, scales, strict=True)]
