"""The teachers' part of the advantages: the reverse KL of the sampled tokens.

    reverse_kl_t = Σ_teachers opd_kl_coef · (l_t - q_t)
    A_t          = clip(A_external_t - w_t · Σ_{k≥0} opd_kl_discount^k · reverse_kl_{t+k})

l is the student's log-prob of a sampled token, q is a teacher's log-prob of this token, and A_external is the advantage
from rewards (0 in pure distillation). With the policy loss `importance_sampling`, the gradient of the loss is then the
gradient of Σ opd_kl_coef · KL(student || teacher). The sum over k is a sum over action tokens.

With several teachers, Σ coef_i (l - q_i) = (Σ coef_i) · l - Σ coef_i q_i, so the two columns Σ coef and Σ coef · q
are enough.

With async rollouts, older weights sampled the tokens. w is then the importance weight min(exp(l - l_sampling),
`STALE_LIMIT`), so that the gradient is again the gradient of the KL at the positions of the samples. Without these
weights, the mean of the reverse KL acts on the tokens of the older weights as a separate gradient: it moves the student
away from the older weights, further with each update, and the accuracy falls. A low limit leaves a part of this
gradient. Otherwise w is 1.

A teacher with another tokenizer may have a reverse KL per chunk instead of per token. A rule assigns it to the tokens
of the chunk:

    reverse_kl_i = w_i · Σ_{j in chunk of i} (l_j - q_j),    Σ_j q_j = the teacher's log-prob of the chunk

| rule | w_i | |
|---|---|---|
| prefix | 1 | every token is a chunk: q is the log-prob of a single student token, see teachers.prefix_logprobs |
| whole | 1 | the policy gradient of Σ over chunks of (L_S - L_T): every token of a chunk is a cause of its bytes |
| with_previous | 1 | whole, plus the previous chunk's penalty, because the end of that chunk may depend on this chunk |
| mean | 1 / n | n tokens share the chunk's penalty equally |
| share | l_i / L_S | each token's part of the student's log-prob of the chunk (DPCA, arXiv 2606.09456) |

l_j is the student's log-prob of token j. L_S and L_T are the log-probs of the whole chunk under the student and the
teacher.

If a chunk has only one student token, all rules except with_previous give l - q. This is exactly the penalty that a
teacher with the student's tokenizer gives.

The tokens of a chunk can change the penalty of the previous chunk only by moving the boundary between the two chunks.
If they do not move it, with_previous has the same expected gradient as whole, but more variance.

Legend: B responses with M tokens in total, concatenated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.losses.batch import sequence_numbers
from roll_opd.objective.registry import AlgorithmError, opd_advantage, register_opd_advantage
from roll_opd.objective.returns_and_gae import clipped, discounted_to_go
from roll_opd.samples.sample import CHUNKS

STALE_LIMIT = 20.0  # largest importance weight of a stale token

Array = TypeVar("Array", Tensor, np.ndarray)


@dataclass(frozen=True)
class TaughtTokens:
    """Tokens with the two parts of their advantages. All arrays are [M] and have no gradient."""

    student_M: Tensor  # f32, the student's log-probs l from before the update
    external_M: Tensor  # f32, A_external
    reverse_kl_M: Tensor  # f32, Σ opd_kl_coef · (l - q) over the teachers of a token; 0 at observed tokens
    actions_M: Tensor  # bool, the tokens that `discount` counts
    lengths: tuple[int, ...]  # number of tokens of each sequence
    discount: float = 0.0  # opd_kl_discount
    clip: float | None = None  # advantage_clip
    stale_M: Tensor | None = None  # f32, the importance weights w; None: 1


@register_opd_advantage("reverse_kl")
def reverse_kl_advantages(tokens: TaughtTokens) -> Tensor:
    """Return clip(A_external - w · Σ_{k≥0} discount^k · reverse_kl_{t+k}) for each token, f32 [M]."""
    to_go_M = tokens.reverse_kl_M
    if tokens.discount:
        to_go_M = discounted_to_go(to_go_M, tokens.actions_M, tokens.lengths, tokens.discount)
    if tokens.stale_M is not None:
        to_go_M = to_go_M * tokens.stale_M
    return clipped(tokens.external_M - to_go_M, tokens.clip)


def reverse_kl(student_M: Array, teacher_M: Array) -> Array:
    """Return l - q of each token, [M]. Its mean over the student's samples estimates KL(student || teacher)."""
    return student_M - teacher_M


def weighted_reverse_kl(student_M: Tensor, coefficients_M: Tensor, weighted_teacher_M: Tensor) -> Tensor:
    """Return Σ coef · (l - q) of each token, f32 [M]. Where the coefficient is 0, `student_M` is ignored.

    Args:
        student_M: student log-probs l, f32.
        coefficients_M: Σ coef_i over the teachers of the token's sample; 0 without teachers and at observed tokens.
        weighted_teacher_M: Σ coef_i · q_i over the same teachers, 0 at observed tokens.
    """
    return torch.where(coefficients_M == 0, 0, coefficients_M * student_M) - weighted_teacher_M


def stale_weights(student_M: Tensor, sampling_M: Tensor, sampled_M: Tensor) -> Tensor:
    """Return the importance weights min(exp(l - l_sampling), `STALE_LIMIT`), f32 [M].

    Args:
        student_M: student log-probs l under the current weights, f32.
        sampling_M: log-probs l_sampling of the weights that sampled each token.
        sampled_M: bool, the tokens in the loss without those of demonstrations. Other tokens have the weight 1.
    """
    return torch.exp(torch.where(sampled_M, student_M - sampling_M, 0)).clamp(max=STALE_LIMIT)


def advantages(
    student_M: Tensor, columns: Mapping[str, Tensor], lengths: Sequence[int], objective: ObjectivePlan
) -> tuple[Tensor, Tensor]:
    """Return (A, Σ opd_kl_coef · reverse_kl): the advantages of `opd_advantage_fn` and the reverse KL, f32 [M] each.

    Raises AlgorithmError if a user's function returns another shape.

    Args:
        student_M: the student's log-probs from before the update, f32.
        columns: the columns of `objective.columns`, [M] each.
        lengths: number of tokens of each sequence.
    """
    tokens = _taught_tokens(student_M, columns, lengths, objective)
    name, arguments = objective.opd_advantage_fn, objective.opd_advantage_fn_args
    found_M = opd_advantage(name, arguments)(tokens, **arguments)
    if found_M.shape != student_M.shape:
        raise AlgorithmError(
            f"opd_advantage_fn {name} returned {list(found_M.shape)} advantages for {len(student_M)} tokens; return one"
            " advantage per token"
        )
    return found_M, tokens.reverse_kl_M


def _taught_tokens(
    student_M: Tensor, columns: Mapping[str, Tensor], lengths: Sequence[int], objective: ObjectivePlan
) -> TaughtTokens:
    reverse_kl_M = weighted_reverse_kl(student_M, columns["opd_coefficients"], columns["opd_teacher"])
    for name in (column.removesuffix(CHUNKS) for column in columns if column.endswith(CHUNKS)):
        own_M = weighted_reverse_kl(student_M, columns[f"{name}/chunk_coefficients"], columns[f"{name}/chunk_teacher"])
        chunks_M = columns[f"{name}/chunks"]
        reverse_kl_M = reverse_kl_M + chunk_penalty(own_M, student_M, chunks_M, lengths, objective.opd_chunk_credit)
    stale_M = None
    if "sampling_logprobs" in columns:
        stale_M = stale_weights(student_M, columns["sampling_logprobs"], sampled_mask(columns))
    return TaughtTokens(
        student_M,
        columns["advantages"],
        reverse_kl_M,
        columns.get("actions", columns["mask"]),
        tuple(lengths),
        objective.opd_kl_discount,
        objective.advantage_clip,
        stale_M,
    )


def sampled_mask(columns: Mapping[str, Tensor]) -> Tensor:
    """Return the mask without the tokens of demonstrations, bool [M]."""
    mask_M, demonstration_M = columns["mask"], columns.get("demonstration")
    return mask_M if demonstration_M is None else mask_M & ~demonstration_M


ChunkCredit = Literal["prefix", "whole", "with_previous", "mean", "share"]


def chunk_penalty(
    penalty_M: Tensor, student_M: Tensor, chunks_M: Tensor, lengths: Sequence[int], rule: ChunkCredit
) -> Tensor:
    """Return each token's penalty, [M], computed from the penalties of the tokens in its chunk.

    A token without a chunk gets the penalty 0.

    Args:
        penalty_M: coefficient times (l - q) of each token.
        student_M: the student's log-probs l.
        chunks_M: int; a token's chunk, as the index of the chunk's first token in the response. Negative: no chunk.
        lengths: number of tokens of each response; the sum is M.
    """
    credited_M = chunks_M >= 0
    starts_B = torch.tensor([0, *lengths[:-1]], dtype=torch.int64).cumsum(0).to(chunks_M.device)
    places_M = torch.arange(len(chunks_M), device=chunks_M.device)
    if len(lengths):
        firsts_M = starts_B[sequence_numbers(lengths, chunks_M.device)] + chunks_M
        places_M = torch.where(credited_M, firsts_M, places_M)

    def of_chunk(values_M: Tensor) -> Tensor:
        return torch.zeros_like(values_M).index_add(0, places_M, values_M)[places_M]

    # `where` instead of a product, since the log-prob of an observed token may be infinite
    penalty_M = torch.where(credited_M, penalty_M, 0)
    counts_M = of_chunk(torch.ones_like(penalty_M))
    summed_M = of_chunk(penalty_M)
    if rule == "mean":
        summed_M = summed_M / counts_M
    elif rule == "share":
        own_M = torch.where(credited_M, student_M, 0)
        total_M = of_chunk(own_M)
        summed_M = summed_M * torch.where(total_M == 0, 1 / counts_M, own_M / total_M)
    summed_M = torch.where(counts_M == 1, penalty_M, summed_M)
    if rule == "with_previous":
        before_M = (places_M - 1).clamp(min=0)
        has_previous_M = (chunks_M > 0) & credited_M[before_M]
        summed_M = summed_M + torch.where(has_previous_M, summed_M[before_M], 0)
    return summed_M
