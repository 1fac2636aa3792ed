"""What every computation over a split vocabulary shares: a rank's columns, chunks of logits, the backward pass.

The logits of a whole batch are never stored. Forward goes through rows in chunks of bounded size and keeps a few
numbers a token; backward computes the logits again in tiles, with no more sums over the vocabulary.

Legend: M scored tokens, C of them in a chunk, E hidden size, V vocabulary columns on this rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from roll_opd.models.memory import CHUNK_BYTES

# of a tile in backward: enough for the products to be bound by arithmetic, and on a GPU for few sums of its gradients
TILE_ROWS = {"cpu": 1024, "cuda": 4096}
LogitsGradient = Callable[[Tensor, slice, slice], Tensor]


@dataclass(frozen=True)
class Columns:
    """The vocabulary columns of this rank."""

    first: int  # token id of its column 0
    real: int  # columns that are no padding
    group: dist.ProcessGroup
    inverse_temperature: float
    chunk_bytes: int

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum (or `op`) over the ranks that share the vocabulary, in place."""
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(values, op=op, group=self.group)
        return values

    def logits(self, hidden_CE: Tensor, weight_VE: Tensor) -> Tensor:
        """Return logits divided by the temperature, f32 [C, V], -inf in padding."""
        logits_CV = raw_logits(hidden_CE, weight_VE)
        if self.inverse_temperature != 1.0:
            logits_CV *= self.inverse_temperature
        if self.real < logits_CV.size(1):
            logits_CV[:, self.real :] = float("-inf")
        return logits_CV

    def log_normaliser(self, logits_CV: Tensor, picked_CK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return log Σ exp over the whole vocabulary, f64 [C], and `picked_CK` summed over the ranks, f64 [C, K].

        Collective; may overwrite `logits_CV`.
        """
        if has_kernels(logits_CV):
            from roll_opd.megatron.head_kernels import peaks_and_sums

            own_C, sums_C = peaks_and_sums(logits_CV)
            largest_C = self.reduce(own_C.clone(), dist.ReduceOp.MAX)
            sums_C *= (own_C - largest_C).double().exp_()
        else:
            largest_C = self.reduce(logits_CV.amax(dim=1), dist.ReduceOp.MAX)
            # summed in f64, so that the result does not depend on how many ranks share the vocabulary
            sums_C = logits_CV.sub_(largest_C[:, None]).exp_().sum(dim=1, dtype=torch.float64)
        sums_C1 = sums_C[:, None]
        both = self.reduce(sums_C1 if picked_CK is None else torch.cat([sums_C1, picked_CK.double()], dim=1))
        return both[:, 0].log() + largest_C, both[:, 1:]

    def log_rest(self, logits_CV: Tensor, taken_CK: Tensor) -> Tensor:
        """Return log Σ exp over the whole vocabulary without the columns `taken_CK`, f64 [C]; -inf where none is left.

        As a sum of its own: 1 - Σ p of the taken ones would have no digits left where they are nearly everything.
        Columns are numbered from this rank's first one. Collective; overwrites `logits_CV`.
        """
        logits_CV.masked_fill_(is_taken(taken_CK, logits_CV.size(1)), float("-inf"))
        largest_C = self.reduce(logits_CV.amax(dim=1), dist.ReduceOp.MAX)
        largest_C = torch.where(largest_C.isfinite(), largest_C, 0)
        sums_C = logits_CV.sub_(largest_C[:, None]).exp_().sum(dim=1, dtype=torch.float64)
        return self.reduce(sums_C).log() + largest_C

    @staticmethod
    def logprobs(logits: Tensor, log_normaliser_C: Tensor) -> Tensor:
        """Subtract the log-normaliser (f64) from `logits`, in place.

        In two parts: near the largest logit the first difference is exact, so what f32 cuts off is not lost.
        """
        high_C = log_normaliser_C.float()
        return logits.sub_(high_C[:, None]).sub_((log_normaliser_C - high_C).float()[:, None])

    def chunks(self, rows: int, columns: int) -> Iterator[slice]:
        """Yield ranges of rows whose logits fit into a chunk; without rows one empty range, for the collectives."""
        step = max(1, self.chunk_bytes // (4 * columns))
        return (slice(start, start + step) for start in range(0, max(rows, 1), step))


def raw_logits(hidden_CE: Tensor, weight_VE: Tensor) -> Tensor:
    """Return the product of hidden states and an output embedding, f32 [C, V].

    Of bf16 factors a GPU has the sums in f32, and gives them as they are: rounded to bf16, a logit of 16 may be wrong
    by 0.06, as much as a student and its teacher differ by in the end. torch's kernels for CPUs know only rounded ones.
    """
    if hidden_CE.is_cuda and hidden_CE.dtype is not torch.float32:
        return torch.mm(hidden_CE, weight_VE.T, out_dtype=torch.float32)
    return (hidden_CE @ weight_VE.T).float()


def has_kernels(tensor: Tensor) -> bool:
    """Whether the kernels of `head_kernels` compute the softmax: on a GPU, where f32 bits may depend on the layout."""
    return tensor.is_cuda and not torch.are_deterministic_algorithms_enabled()


def is_taken(columns_CK: Tensor, width: int) -> Tensor:
    """Return which of `width` columns are among `columns_CK`, bool [C, width]; other ranks' columns are not."""
    mine_CK = (columns_CK >= 0) & (columns_CK < width)
    taken = torch.zeros(len(columns_CK), width + 1, dtype=torch.bool, device=columns_CK.device)
    return taken.scatter_(1, torch.where(mine_CK, columns_CK, width), True)[:, :width]


def columns_of(
    weight_VE: Tensor, *, temperature: float, vocab_size: int, group: dist.ProcessGroup, chunk_bytes: int | None
) -> Columns:
    """Return this rank's columns, where every rank of `group` holds as many rows of the output embedding.

    `chunk_bytes` None: the device's own (`memory.CHUNK_BYTES`).
    """
    chunk_bytes = chunk_bytes or CHUNK_BYTES[weight_VE.device.type]
    first = dist.get_rank(group) * weight_VE.size(0)
    real = min(max(vocab_size - first, 0), weight_VE.size(0))
    return Columns(first, real, group, 1.0 / temperature, chunk_bytes)


def backward_through_logits(
    columns: Columns,
    hidden_ME: Tensor,
    weight_VE: Tensor,
    weight_grad_VE: Tensor | None,
    logits_grad: LogitsGradient,
    *,
    weight_trainable: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of hidden states and output embedding; each tile's logits are computed again.

    Args:
        weight_grad_VE: f32, where the embedding's gradient is added; None: it is returned.
        logits_grad: (raw logits f32 of a tile, its rows, its columns) -> gradient of these logits, in any dtype; may
            overwrite its logits. See `tempered`.
        weight_trainable: False leaves the embedding's gradient out.
    """
    grad_hidden_ME = torch.zeros_like(hidden_ME, dtype=torch.float32)
    total_VE = weight_grad_VE
    if weight_trainable and total_VE is None:
        total_VE = torch.zeros_like(weight_VE, dtype=torch.float32)
    height = min(TILE_ROWS[hidden_ME.device.type], max(hidden_ME.size(0), 1))
    width = max(1, columns.chunk_bytes // (4 * height))
    for top in range(0, hidden_ME.size(0), height):
        rows = slice(top, top + height)
        hidden_CE = hidden_ME[rows]
        for left in range(0, columns.real, width):
            part = slice(left, min(left + width, columns.real))
            grad_CV = logits_grad(raw_logits(hidden_CE, weight_VE[part]), rows, part).to(hidden_ME.dtype)
            _add_product(grad_hidden_ME[rows], grad_CV, weight_VE[part])
            if total_VE is not None:
                _add_product(total_VE[part], grad_CV.T, hidden_CE)
    returned_VE = None if total_VE is None or weight_grad_VE is not None else total_VE.to(weight_VE.dtype)
    return grad_hidden_ME.to(hidden_ME.dtype), returned_VE


def tempered(columns: Columns, logits_grad: LogitsGradient) -> LogitsGradient:
    """Return the gradient of raw logits from `logits_grad`, that of logits over the temperature."""
    scale = columns.inverse_temperature
    if scale == 1.0:
        return logits_grad
    return lambda logits_CV, rows, part: logits_grad(logits_CV.mul_(scale), rows, part).mul_(scale)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)  # in place: no temporary of the size of `total`
    elif total.is_cuda:  # its products of bf16 are sums in f32
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
