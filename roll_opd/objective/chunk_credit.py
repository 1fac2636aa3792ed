"""Assign a chunk's reverse KL to the student tokens in the chunk, for teachers with another tokenizer.

    penalty_i = w_i · Σ_{j in chunk of i} (l_j - q_j),    Σ_j q_j = the teacher's log-prob of the chunk

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

Legend: B responses with M tokens in total.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from roll_opd.objective.losses.batch import sequence_numbers

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
