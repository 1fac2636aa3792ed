"""Moments of the sampling distribution over a split vocabulary, for the test of the engine's samples.

Legend: M scored tokens, C of them in a chunk, V vocabulary columns on this rank, W columns of all ranks, X quantities
of `objective.engine_evidence.sampling_sums`.
"""

from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from roll_opd.megatron.vocabulary import Columns, VocabShard
from roll_opd.objective.engine_evidence import LAMBDAS, kept_tokens

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


def _gathered(logprobs_CV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the columns of all ranks in vocabulary order, [C, W]. Collective."""
    if dist.get_world_size(group) == 1:
        return logprobs_CV
    pieces = [torch.empty_like(logprobs_CV) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, logprobs_CV.contiguous(), group=group)
    return torch.cat(pieces, dim=1)
