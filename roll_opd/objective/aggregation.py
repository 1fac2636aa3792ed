"""Loss aggregation: weights of tokens for `loss_agg_mode`.

The weights are computed for the whole batch before it is split. The loss is the weighted sum over tokens, so it does
not depend on the split into micro-batches, ranks or packs.

Legend: B sequences with M scored tokens in total.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from roll_opd.config.plan import ObjectivePlan

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def token_weights(
    masks: Sequence[Tensor], mode: str, normaliser: float | None = None, parts: Sequence[Hashable] | None = None
) -> list[Tensor]:
    """Return the token weights of each sequence of the whole batch, f32 [M_b].

    Weights outside the mask are 0.

    Args:
        masks: the mask of each of the B sequences of all ranks, bool [M_b].
        mode, normaliser, parts: see `token_scales`.
    """
    return scaled(masks, token_scales([int(mask.sum()) for mask in masks], mode, normaliser, parts))


def token_scales(
    tokens: Sequence[int], mode: str, normaliser: float | None = None, parts: Sequence[Hashable] | None = None
) -> list[float]:
    """Return one weight per sequence of the whole batch. All tokens of the sequence have this weight.

    Sequences without an action token are not counted in the number of sequences.

    Args:
        tokens: number of tokens in the loss, for each of the B sequences of all ranks.
        mode: how the token losses are combined:
            "token-mean": mean over all tokens.
            "seq-mean-token-sum": sum over the tokens of each sequence, then mean over sequences.
            "seq-mean-token-mean" (ROLL's default): mean over the tokens of each sequence, then mean over sequences.
            "seq-mean-token-sum-norm": sum over all tokens, divided by `normaliser` (Dr. GRPO, arXiv 2503.20783).
        parts: the part of the batch to which each sequence belongs. Each part is averaged separately, and the averages
            are added. None: the batch is one part.

    Raises:
        ValueError: if the mode is unknown, or if a required normaliser is missing.
    """
    if parts is not None:
        scales: dict[int, float] = {}
        for part in set(parts):
            members = [number for number, own in enumerate(parts) if own == part]
            scales |= zip(members, token_scales([tokens[n] for n in members], mode, normaliser), strict=True)
        return [scales[number] for number in range(len(tokens))]
    sequences = max(sum(count > 0 for count in tokens), 1)
    if mode == "token-mean":
        return [1.0 / max(sum(tokens), 1)] * len(tokens)
    if mode == "seq-mean-token-sum":
        return [1.0 / sequences] * len(tokens)
    if mode == "seq-mean-token-mean":
        return [1.0 / (sequences * max(count, 1)) for count in tokens]
    if mode != "seq-mean-token-sum-norm":
        raise ValueError(f"loss_agg_mode {mode!r} is unknown; use one of {', '.join(MODES)}")
    if not normaliser:
        raise ValueError("loss_agg_mode seq-mean-token-sum-norm needs a normaliser greater than 0")
    return [1.0 / normaliser] * len(tokens)


def loss_scales(tokens: Sequence[int], demonstrations: Sequence[bool], objective: ObjectivePlan) -> list[float]:
    """Return the `token_scales` of the samples of an update.

    Demonstrations are averaged separately from the other samples.
    """
    return token_scales(tokens, objective.loss_agg_mode, objective.loss_normaliser, parts=demonstrations)


def value_scales(tokens: Sequence[int]) -> list[float]:
    """Return the `token_scales` of a critic's update.

    As in ROLL, they do not depend on the aggregation mode of the policy loss.
    """
    return token_scales(tokens, "seq-mean-token-mean")


def scaled(masks: Sequence[Tensor], scales: Sequence[float]) -> list[Tensor]:
    """Return the token weights of each sequence, f32 [M_b]: the scale where the mask is True, and 0 elsewhere."""
    return [mask.to(torch.float32) * scale for mask, scale in zip(masks, scales, strict=True)]
