"""Token log-probs from hidden states, with the vocabulary split over tensor ranks.

The logits of a whole batch are never stored: rows go through in chunks of bounded size, forward keeps one number a
token (its log-normaliser), and backward computes each chunk's logits again.

Legend: M scored tokens, C of them in a chunk, E hidden size, V vocabulary columns on this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 64 * 2**20  # f32 logits of one chunk on one rank


def vocab_parallel_logprobs(
    hidden_ME: Tensor,
    weight_VE: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return log softmax(hidden · weightᵀ / temperature)[target] as f32 [M].

    Args:
        hidden_ME: hidden states, the same on every rank of `group`. Their gradient is this rank's share: the caller
            sums it over the group (Megatron's copy-to / gather-from region functions do).
        weight_VE: this rank's rows of the output embedding.
        targets_M: int64 token ids of the whole vocabulary.
        temperature: divides the logits.
        vocab_size: real columns; what lies beyond is padding and takes no part.
        group: the tensor-parallel ranks, in vocabulary order.
        chunk_bytes: bound on the f32 logits held at a time.
    """
    rank_offset = dist.get_rank(group) * weight_VE.size(0)
    real_columns = min(max(vocab_size - rank_offset, 0), weight_VE.size(0))
    rows = max(1, chunk_bytes // (4 * weight_VE.size(0)))
    return _VocabParallelLogprobs.apply(
        hidden_ME, weight_VE, targets_M - rank_offset, 1.0 / temperature, real_columns, group, rows
    )


def _chunk_logits(hidden_CE: Tensor, weight_VE: Tensor, inverse_temperature: float, real_columns: int) -> Tensor:
    logits_CV = (hidden_CE @ weight_VE.T).float()
    if inverse_temperature != 1.0:
        logits_CV *= inverse_temperature
    if real_columns < logits_CV.size(1):
        logits_CV[:, real_columns:] = float("-inf")
    return logits_CV


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx, hidden_ME, weight_VE, local_targets_M, inverse_temperature, real_columns, group, rows
    ):
        parallel = dist.get_world_size(group) > 1
        logprobs, log_normalisers = [], []
        for start in range(0, max(hidden_ME.size(0), 1), rows):  # one (empty) chunk where nothing is scored
            logits_CV = _chunk_logits(hidden_ME[start : start + rows], weight_VE, inverse_temperature, real_columns)
            targets_C = local_targets_M[start : start + rows]
            mine_C = (targets_C >= 0) & (targets_C < real_columns)
            picked_C = logits_CV.gather(1, targets_C.clamp(0, logits_CV.size(1) - 1)[:, None])[:, 0]
            picked_C = torch.where(mine_C, picked_C, 0.0)
            largest_C = logits_CV.amax(dim=1)
            if parallel:
                dist.all_reduce(largest_C, op=dist.ReduceOp.MAX, group=group)
            # summed in f64, so that the result does not depend on how many ranks share the vocabulary
            sums_C = logits_CV.sub_(largest_C[:, None]).exp_().sum(dim=1, dtype=torch.float64)
            if parallel:  # one collective for both
                both = torch.stack([sums_C, picked_C.double()])
                dist.all_reduce(both, group=group)
                sums_C, picked_C = both
            log_normaliser_C = sums_C.log() + largest_C
            logprobs.append((picked_C - log_normaliser_C).float())
            log_normalisers.append(log_normaliser_C.float())
        ctx.save_for_backward(hidden_ME, weight_VE, local_targets_M, torch.cat(log_normalisers))
        ctx.settings = inverse_temperature, real_columns, rows
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx, grad_M):  # type: ignore[override]
        hidden_ME, weight_VE, local_targets_M, log_normaliser_M = ctx.saved_tensors
        inverse_temperature, real_columns, rows = ctx.settings
        grad_hidden_ME = torch.empty_like(hidden_ME)
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32)
        for start in range(0, hidden_ME.size(0), rows):
            chunk = slice(start, start + rows)
            hidden_CE, targets_C = hidden_ME[chunk], local_targets_M[chunk]
            probabilities_CV = (
                _chunk_logits(hidden_CE, weight_VE, inverse_temperature, real_columns)
                .sub_(log_normaliser_M[chunk, None])
                .exp_()
            )
            # d log p[target] / d logit = onehot(target) - p, times the temperature's chain factor
            scale_C = grad_M[chunk].float() * inverse_temperature
            grad_logits_CV = probabilities_CV.mul_(-scale_C[:, None])
            mine_C = (targets_C >= 0) & (targets_C < real_columns)
            grad_logits_CV.scatter_add_(
                1,
                targets_C.clamp(0, grad_logits_CV.size(1) - 1)[:, None],
                torch.where(mine_C, scale_C, 0.0)[:, None],
            )
            grad_logits_CV = grad_logits_CV.to(hidden_ME.dtype)
            grad_hidden_ME[chunk] = grad_logits_CV @ weight_VE
            grad_weight_VE += grad_logits_CV.T @ hidden_CE
        return grad_hidden_ME, grad_weight_VE.to(weight_VE.dtype), None, None, None, None, None
