"""Divergence and entropy over the whole vocabulary from hidden states, with the vocabulary split over tensor ranks.

Both are sums over columns of a function f of the student's log-prob (and the teacher's). With g = ∂f/∂log-prob,
the gradient of the logits is g - p Σg: forward keeps Σg and the log-normalisers, a few numbers a token, and backward
computes the columns again.

Legend: M scored tokens, C of them in a chunk, E and F hidden sizes of student and teacher, V vocabulary columns on this
rank.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll_opd.algorithms.divergences import ENTROPY, ColumnSum
from roll_opd.megatron.vocabulary import Columns, backward_through_logits, columns_of, raw_logits, tempered

BLOCK_COLUMNS = 4096  # of a chunk at a time in forward: bounds what the column function stores on the way


def vocab_parallel_divergence(
    hidden_ME: Tensor,
    weight_VE: Tensor,
    teacher_hidden_MF: Tensor,
    teacher_weight_VF: Tensor,
    measure: ColumnSum,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    weight_grad_VE: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Return the divergence between student and teacher over the vocabulary, f32 [M], with gradient to the student.

    Args:
        hidden_ME: the student's hidden states; see `logprobs.vocab_parallel_logprobs` for their gradient.
        weight_VE: this rank's rows of the student's output embedding.
        teacher_hidden_MF: the teacher's hidden states, the same on every rank of `group`.
        teacher_weight_VF: the teacher's output embedding for the same V columns; see `shard_of_head`.
        measure: which divergence.
        temperature: divides the logits of both.
        vocab_size: columns that both have; each side's probabilities sum to 1 over these.
        group, weight_grad_VE, chunk_bytes: as for `vocab_parallel_logprobs`.
    """
    columns = columns_of(
        weight_VE, temperature=temperature, vocab_size=vocab_size, group=group, chunk_bytes=chunk_bytes
    )
    columns = replace(columns, chunk_bytes=columns.chunk_bytes // 2)  # two sides in each chunk
    return _VocabParallelSum.apply(
        hidden_ME, weight_VE, teacher_hidden_MF, teacher_weight_VF, measure, columns, weight_grad_VE
    )


def vocab_parallel_entropy(
    hidden_ME: Tensor,
    weight_VE: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    weight_grad_VE: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Return the entropy of the next token's distribution in nats, f32 [M]; arguments as `vocab_parallel_logprobs`."""
    columns = columns_of(
        weight_VE, temperature=temperature, vocab_size=vocab_size, group=group, chunk_bytes=chunk_bytes
    )
    return _VocabParallelSum.apply(hidden_ME, weight_VE, None, None, ENTROPY, columns, weight_grad_VE)


def shard_of_head(head_WF: Tensor, *, first: int, columns: int) -> Tensor:
    """Cut a teacher's whole output embedding to `columns` rows from `first` on, zeros where it has none."""
    shard_VF = head_WF.new_zeros(columns, head_WF.size(1))
    mine_VF = head_WF[first : first + columns]
    shard_VF[: len(mine_VF)] = mine_VF
    return shard_VF


class _VocabParallelSum(torch.autograd.Function):
    """Σ over columns of `measure`; without a teacher, of the student's log-probs alone."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: Tensor,
        weight_VE: Tensor,
        teacher_MF: Tensor | None,
        teacher_VF: Tensor | None,
        measure: ColumnSum,
        columns: Columns,
        weight_grad_VE: Tensor | None,
    ) -> Tensor:
        sides = [(hidden_ME, weight_VE)]
        if teacher_MF is not None and teacher_VF is not None:
            sides.append((teacher_MF, teacher_VF))
        values, slopes, log_normalisers = [], [], []
        for chunk in columns.chunks(hidden_ME.size(0), weight_VE.size(0)):
            logits = [columns.logits(hidden[chunk], weight) for hidden, weight in sides]
            normalisers = [columns.log_normaliser(logits_CV.clone())[0] for logits_CV in logits]
            logprobs = [Columns.logprobs(*pair) for pair in zip(logits, normalisers, strict=True)]
            sums = torch.zeros(2, len(logits[0]), dtype=torch.float64, device=hidden_ME.device)
            for start in range(0, weight_VE.size(0), BLOCK_COLUMNS):
                block = [logprobs_CV[:, start : start + BLOCK_COLUMNS] for logprobs_CV in logprobs]
                sums[0] += measure.value(*block).sum(1, dtype=torch.float64)
                sums[1] += measure.slope(*block).sum(1, dtype=torch.float64)
            columns.reduce(sums)
            values.append(sums[0].float())
            slopes.append(sums[1].float())
            log_normalisers.append(torch.stack(normalisers))
        ctx.save_for_backward(
            hidden_ME, weight_VE, teacher_MF, teacher_VF, torch.cat(slopes), torch.cat(log_normalisers, dim=1)
        )
        ctx.measure, ctx.columns, ctx.weight_grad_VE = measure, columns, weight_grad_VE
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ME, weight_VE, teacher_MF, teacher_VF, slope_M, log_normalisers_SM = ctx.saved_tensors
        columns, grad_M = ctx.columns, grad_M.float()

        def logits_grad(logits_CV: Tensor, rows: slice, part: slice) -> Tensor:
            logprobs = [Columns.logprobs(logits_CV, log_normalisers_SM[0, rows])]
            if teacher_MF is not None:
                teacher_CV = raw_logits(teacher_MF[rows], teacher_VF[part]).mul_(columns.inverse_temperature)
                logprobs.append(Columns.logprobs(teacher_CV, log_normalisers_SM[1, rows]))
            grad_CV = ctx.measure.slope(*logprobs) - logprobs[0].exp() * slope_M[rows, None]
            return grad_CV.mul_(grad_M[rows, None])

        settings = {"weight_trainable": ctx.needs_input_grad[1]}
        gradient = tempered(columns, logits_grad)
        grads = backward_through_logits(columns, hidden_ME, weight_VE, ctx.weight_grad_VE, gradient, **settings)
        return *grads, None, None, None, None, None
