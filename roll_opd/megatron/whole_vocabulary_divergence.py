"""Vocabulary-parallel divergence and entropy over the whole vocabulary, computed from hidden states.

The divergence and the entropy are sums of a function f over the columns of the vocabulary. For the entropy, f depends
on the student's log-prob. For the divergence, f depends on the log-probs of the student and of the teacher.

Let p be the student's probability of a column, and let g = ∂f/∂log-prob. The gradient with respect to the column's
logit is then g - p Σg. The forward pass therefore keeps only Σg and the log-normalisers, which are a few numbers per
token, and the backward pass recomputes the columns.

Legend: M scored tokens, C of them in a chunk, E and F hidden sizes of student and teacher, V vocabulary columns on this
rank.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from roll_opd.megatron.vocabulary import Columns, VocabShard, backward_through_logits, raw_logits, tempered
from roll_opd.objective.divergences import ENTROPY, ColumnSum

BLOCK_COLUMNS = 4096  # forward evaluates the measure on this many columns at a time, to bound its temporaries


def vocab_parallel_divergence(
    hidden_ME: Tensor,
    vocab: VocabShard,
    teacher_hidden_MF: Tensor,
    teacher_weight_VF: Tensor,
    measure: ColumnSum,
    teacher_cap: float | None = None,
) -> Tensor:
    """Return the divergence of student and teacher over the vocabulary, f32 [M]. Only the student gets a gradient.

    Args:
        hidden_ME: the student's hidden states. `logprobs.vocab_parallel_logprobs` describes their gradient.
        vocab: the student's output embedding. Its `temperature` and `vocab_size` hold for both models: each
            distribution is normalised over the first `vocab_size` columns.
        teacher_hidden_MF: the teacher's hidden states; all ranks of the group pass the same states.
        teacher_weight_VF: the teacher's output embedding for the same V columns; see `shard_of_head`.
        measure: the divergence.
        teacher_cap: the cap of the teacher's logits.
    """
    columns = vocab.columns
    columns = replace(columns, chunk_bytes=columns.chunk_bytes // 2)  # a chunk has the logits of both models
    teacher = teacher_hidden_MF, teacher_weight_VF
    both = columns, replace(columns, cap=teacher_cap)
    return _VocabParallelSum.apply(hidden_ME, vocab.weight_VE, *teacher, measure, both, vocab.weight_grad_VE)


def vocab_parallel_entropy(hidden_ME: Tensor, vocab: VocabShard) -> Tensor:
    """Return the entropy of the next-token distribution in nats, f32 [M]."""
    student = (vocab.columns,)
    return _VocabParallelSum.apply(hidden_ME, vocab.weight_VE, None, None, ENTROPY, student, vocab.weight_grad_VE)


def shard_of_head(head_WF: Tensor, *, first: int, columns: int) -> Tensor:
    """Return a shard of a teacher's output embedding, padded with zeros at the end.

    - `first`: index of the first row of the shard.
    - `columns`: number of rows of the shard, one per vocabulary column of this rank (V).
    """
    shard_VF = head_WF.new_zeros(columns, head_WF.size(1))
    mine_VF = head_WF[first : first + columns]
    shard_VF[: len(mine_VF)] = mine_VF
    return shard_VF


class _VocabParallelSum(torch.autograd.Function):
    """Sum of `measure` over the columns of the vocabulary.

    `measure` is a function of the student's log-prob and, with a teacher, also of the teacher's log-prob.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: Tensor,
        weight_VE: Tensor,
        teacher_MF: Tensor | None,
        teacher_VF: Tensor | None,
        measure: ColumnSum,
        columns_of: tuple[Columns, ...],
        weight_grad_VE: Tensor | None,
    ) -> Tensor:
        columns = columns_of[0]
        sides = [(hidden_ME, weight_VE)]
        if teacher_MF is not None and teacher_VF is not None:
            sides.append((teacher_MF, teacher_VF))
        values, slopes, log_normalisers = [], [], []
        for chunk in columns.chunks(hidden_ME.size(0), weight_VE.size(0)):
            logits = [of.logits(hidden[chunk], weight) for of, (hidden, weight) in zip(columns_of, sides, strict=True)]
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
        ctx.measure, ctx.columns_of, ctx.weight_grad_VE = measure, columns_of, weight_grad_VE
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ME, weight_VE, teacher_MF, teacher_VF, slope_M, log_normalisers_SM = ctx.saved_tensors
        columns, grad_M = ctx.columns_of[0], grad_M.float()

        def logits_grad(logits_CV: Tensor, rows: slice, part: slice) -> Tensor:
            logprobs = [Columns.logprobs(logits_CV, log_normalisers_SM[0, rows])]
            if teacher_MF is not None:
                teacher_CV = ctx.columns_of[1].scaled(raw_logits(teacher_MF[rows], teacher_VF[part]))
                logprobs.append(Columns.logprobs(teacher_CV, log_normalisers_SM[1, rows]))
            grad_CV = ctx.measure.slope(*logprobs) - logprobs[0].exp() * slope_M[rows, None]
            return grad_CV.mul_(grad_M[rows, None])

        settings = {"weight_trainable": ctx.needs_input_grad[1]}
        gradient = tempered(columns, logits_grad)
        grads = backward_through_logits(columns, hidden_ME, weight_VE, ctx.weight_grad_VE, gradient, **settings)
        return *grads, None, None, None, None, None
