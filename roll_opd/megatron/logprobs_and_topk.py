"""Log-probs and top-k tokens over a split vocabulary, and moments for the test of the engine's samples.

All are computed from hidden states, in chunks.

Legend: M scored tokens, C of them in a chunk, K requested tokens per position, E hidden size, V vocabulary columns on
this rank, W columns of all ranks, X quantities of `objective.engine_evidence.sampling_sums`.
"""

from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll_opd.megatron.vocabulary import Columns, VocabShard, backward_through_logits, has_kernels, is_taken, tempered
from roll_opd.objective.engine_evidence import LAMBDAS, kept_tokens


def vocab_parallel_logprobs(
    hidden_ME: Tensor, vocab: VocabShard, targets: Tensor, *, with_rest: bool = False
) -> Tensor:
    """Return the log-probs of target tokens, f32 [M] or [M, K].

    The log-probs are log softmax(hidden · weightᵀ / temperature)[target].

    Args:
        hidden_ME: hidden states, equal on all ranks of `vocab.group`. In backward, each rank computes only its part of
            their gradient. The caller must sum the parts over the group, for example with Megatron's copy-to or
            gather-from region functions.
        targets: int64 [M] or [M, K], token ids in the whole vocabulary. The ids of a row must be distinct.
        with_rest: append a column K+1 with the log-prob of all other tokens together. `targets` must then be [M, K].
    """
    columns = vocab.columns
    targets_MK = (targets[:, None] if targets.ndim == 1 else targets) - columns.first
    arguments = hidden_ME, vocab.weight_VE, targets_MK, columns, vocab.weight_grad_VE, with_rest
    logprobs = _VocabParallelLogprobs.apply(*arguments)
    return logprobs if with_rest else logprobs.view(targets.shape)


def vocab_parallel_topk(hidden_ME: Tensor, vocab: VocabShard, k: int) -> tuple[Tensor, Tensor]:
    """Return (ids, log-probs) of the `k` most likely tokens, in descending order.

    - ids: int64 [M, K]
    - log-probs: f32 [M, K+1], without gradient

    Column K+1 is the log-prob of all other tokens together. It is -inf if there are no other tokens. Raises ValueError
    if `k` is above `vocab.vocab_size`.
    """
    if not 1 <= k <= vocab.vocab_size:
        raise ValueError(
            f"top-k of {k} tokens, but the vocabulary has {vocab.vocab_size}; use a k of 1 to {vocab.vocab_size}"
        )
    columns, weight_VE, group = vocab.columns, vocab.weight_VE, vocab.group
    ids, logprobs = [], []
    with torch.no_grad():
        for chunk in columns.chunks(hidden_ME.size(0), weight_VE.size(0)):
            logits_CV = columns.logits(hidden_ME[chunk], weight_VE)
            best_CK, ids_CK = logits_CV.topk(min(k, weight_VE.size(0)), dim=1)
            best_CK, ids_CK = _gathered(best_CK, group), _gathered(ids_CK + columns.first, group)
            best_CK, places_CK = best_CK.topk(k, dim=1)
            ids.append(ids_CK.gather(1, places_CK))
            logprobs.append(_with_rest(best_CK, columns.log_rest(logits_CV, ids[-1] - columns.first))[0])
    return torch.cat(ids), torch.cat(logprobs)


def _with_rest(picked_CK: Tensor, log_rest_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-probs, log-normalisers) from the logits of some tokens and a sum over all other tokens.

    - log-probs: f32 [C, K+1]
    - log-normalisers: f64 [C]

    Args:
        picked_CK: logits of the picked tokens.
        log_rest_C: log Σ exp over the logits of all other tokens.
    """
    both_CL = torch.cat([picked_CK.double(), log_rest_C[:, None]], dim=1)
    log_normaliser_C = both_CL.logsumexp(1)
    return (both_CL - log_normaliser_C[:, None]).float(), log_normaliser_C


def _gathered(values_CK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the columns of all ranks in vocabulary order. Collective."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return values_CK
    pieces = [torch.empty_like(values_CK) for _ in range(ranks)]
    dist.all_gather(pieces, values_CK.contiguous(), group=group)
    return torch.cat(pieces, dim=1)


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: Tensor,
        weight_VE: Tensor,
        targets_MK: Tensor,
        columns: Columns,
        weight_grad_VE: Tensor | None,
        with_rest: bool,
    ) -> Tensor:
        logprobs, log_normalisers, log_rests = [], [], []
        for chunk in columns.chunks(hidden_ME.size(0), weight_VE.size(0)):
            logits_CV = columns.logits(hidden_ME[chunk], weight_VE)
            targets_CK = targets_MK[chunk]
            mine_CK = (targets_CK >= 0) & (targets_CK < columns.real)
            picked_CK = logits_CV.gather(1, targets_CK.clamp(0, logits_CV.size(1) - 1))
            picked_CK = torch.where(mine_CK, picked_CK, 0.0)
            if with_rest:
                log_rests.append(columns.log_rest(logits_CV, targets_CK))
                values, log_normaliser_C = _with_rest(columns.reduce(picked_CK), log_rests[-1])
            else:
                log_normaliser_C, picked_CK = columns.log_normaliser(logits_CV, picked_CK)
                values = (picked_CK - log_normaliser_C[:, None]).float()
            logprobs.append(values)
            log_normalisers.append(log_normaliser_C)
        log_rest_M = torch.cat(log_rests) if with_rest else None
        ctx.save_for_backward(hidden_ME, weight_VE, targets_MK, torch.cat(log_normalisers), log_rest_M)
        ctx.columns, ctx.weight_grad_VE = columns, weight_grad_VE
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, grad_MK: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ME, weight_VE, targets_MK, log_normaliser_M, log_rest_M = ctx.saved_tensors
        if not grad_MK.any():  # all advantages are zero, for example if the loss is only a divergence
            # autograd needs a gradient for the weight, even zeros
            needs_zeros = ctx.needs_input_grad[1] and ctx.weight_grad_VE is None
            zeros_VE = torch.zeros_like(weight_VE) if needs_zeros else None
            return torch.zeros_like(hidden_ME), zeros_VE, None, None, None, None
        grad_MK = grad_MK.float()

        def logits_grad(logits_CV: Tensor, rows: slice, part: slice) -> Tensor:
            # Σ_k g_k · d log p[k] / d logit = Σ_k g_k · onehot(k) - p · Σ_k g_k
            grad_CK, targets_CK = grad_MK[rows], targets_MK[rows] - part.start
            rest_CV = None
            if log_rest_M is not None:  # for the rest, its distribution over tokens replaces the onehot
                taken_CV = is_taken(targets_CK, logits_CV.size(1))
                rest_CV = Columns.logprobs(logits_CV.clone(), log_rest_M[rows]).exp_().masked_fill_(taken_CV, 0.0)
                rest_CV *= grad_CK[:, -1:]
            grad_CV = Columns.logprobs(logits_CV, log_normaliser_M[rows]).exp_().mul_(-grad_CK.sum(1, keepdim=True))
            width = logits_CV.size(1)
            mine_CK = (targets_CK >= 0) & (targets_CK < width)
            picked_CK = torch.where(mine_CK, grad_CK[:, : targets_CK.size(1)], 0.0)
            grad_CV.scatter_add_(1, targets_CK.clamp(0, width - 1), picked_CK)
            return grad_CV if rest_CV is None else grad_CV.add_(rest_CV)

        def in_one_pass(logits_CV: Tensor, rows: slice, part: slice) -> Tensor:
            from roll_opd.megatron.triton_kernels import logprob_gradient

            rowwise = log_normaliser_M[rows], grad_MK[rows, 0], targets_MK[rows, 0] - part.start
            return logprob_gradient(logits_CV, *rowwise, ctx.columns.inverse_temperature, hidden_ME.dtype)

        is_plain = log_rest_M is None and targets_MK.size(1) == 1 and ctx.columns.cap is None and has_kernels(hidden_ME)
        gradient = in_one_pass if is_plain else tempered(ctx.columns, logits_grad)
        settings = {"weight_trainable": ctx.needs_input_grad[1]}
        grads = backward_through_logits(ctx.columns, hidden_ME, weight_VE, ctx.weight_grad_VE, gradient, **settings)
        return *grads, None, None, None, None


TEMPORARIES = 4  # tensors of a chunk's size that are held at a time


def vocab_parallel_moments(hidden_ME: Tensor, vocab: VocabShard, targets_M: Tensor, settings_M3: Tensor) -> Tensor:
    """Return the moments of each token's log-prob under the sampling distribution, f32 [M, X]. Has no gradient.

    `objective.engine_evidence.sampling_sums` describes the X quantities. Without top-k and top-p each rank sums over
    its own columns; with them the columns of all ranks are gathered.

    `settings_M3`: temperature, top-k and top-p of each token. At temperature 0, the distribution has only the most
    likely token, and its log-prob is the one at temperature 1, as in vLLM.
    """
    columns = vocab.columns
    temperature_M, top_k_M, top_p_M = settings_M3.unbind(1)
    is_greedy_M = temperature_M == 0
    scale_M = vocab.temperature / temperature_M.masked_fill(is_greedy_M, 1.0)
    top_k_M = top_k_M.masked_fill(is_greedy_M, 1)
    is_scaled = bool((scale_M != 1).any())
    keeps_all = bool(((top_k_M < 1) & (top_p_M == 1)).all())
    columns = replace(columns, chunk_bytes=columns.chunk_bytes // TEMPORARIES)
    found = []
    with torch.no_grad():
        for chunk in columns.chunks(hidden_ME.size(0), vocab.weight_VE.size(0)):
            logits_CV = columns.logits(hidden_ME[chunk], vocab.weight_VE)
            if is_scaled:
                logits_CV.mul_(scale_M[chunk, None])
            target_C1 = (targets_M[chunk] - columns.first)[:, None]
            mine_C1 = (target_C1 >= 0) & (target_C1 < columns.real)
            picked_C1 = logits_CV.gather(1, target_C1.clamp(0, logits_CV.size(1) - 1))
            picked_C1 = torch.where(mine_C1, picked_C1, 0.0)
            log_normaliser_C, picked_C1 = columns.log_normaliser(logits_CV.clone(), picked_C1)
            logprob_C = picked_C1[:, 0] - log_normaliser_C
            logprobs_CV = Columns.logprobs(logits_CV, log_normaliser_C)
            if keeps_all:
                sums_CX, log_mass_C = columns.reduce(_sums(logprobs_CV)), torch.zeros_like(logprob_C)
            else:
                logprobs_CW = _gathered(logprobs_CV, columns.group)
                kept_CW = kept_tokens(logprobs_CW, top_k_M[chunk], top_p_M[chunk])
                is_kept_C = kept_CW.gather(1, targets_M[chunk][:, None])[:, 0]
                logprobs_CW = logprobs_CW.masked_fill(~kept_CW, float("-inf"))
                sums_CX = _sums(logprobs_CW)
                log_mass_C = torch.where(is_kept_C, sums_CX[:, 0].log(), float("inf"))
                log_mass_C = log_mass_C.masked_fill(is_greedy_M[chunk], 0.0)
            mean_C, square_C, *powers = (sums_CX[:, 1:] / sums_CX[:, :1]).unbind(1)
            variance_C = (square_C - mean_C.square()).clamp(min=0)
            found.append(
                torch.stack([logprob_C, log_mass_C, mean_C, variance_C, *(power.log() for power in powers)], dim=1)
            )
    return torch.cat(found).float()


def _sums(logprobs_CV: Tensor) -> Tensor:
    """Return Σ p, Σ p log p, Σ p (log p)² and Σ p^(1+λ) for each λ, over this rank's columns, f64 [C, X-1]."""
    p_CV = logprobs_CV.exp()
    log_CV = logprobs_CV.masked_fill(logprobs_CV == float("-inf"), 0.0)
    first_CV = p_CV * log_CV
    terms = chain((p_CV, first_CV, first_CV * log_CV), (logprobs_CV.mul(1 + power).exp_() for power in LAMBDAS))
    return torch.stack([each_CV.sum(1, dtype=torch.float64) for each_CV in terms], dim=1)
