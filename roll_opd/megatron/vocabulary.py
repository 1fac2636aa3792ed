"""Vocabulary-parallel logits: the columns of a rank, logits in chunks, log-normalisers, and the backward pass.

The logits of a whole batch are never stored. The forward pass computes logits in chunks of rows. The size of a chunk is
bounded, and only a few numbers per token are kept. The backward pass recomputes the logits in tiles, and needs no
further sums over the vocabulary.

Legend: M scored tokens, C of them in a chunk, E hidden size, V vocabulary columns on this rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from roll_opd.models.memory import CHUNK_BYTES

# rows of a tile in backward: large enough to be compute-bound, and on a GPU to accumulate gradients rarely
TILE_ROWS = {"cpu": 1024, "cuda": 4096}
LogitsGradient = Callable[[Tensor, slice, slice], Tensor]  # see `backward_through_logits`


@dataclass(frozen=True)
class Columns:
    """Vocabulary columns of one rank."""

    first: int  # token id of column 0
    real: int  # columns without padding
    group: dist.ProcessGroup
    inverse_temperature: float
    chunk_bytes: int
    cap: float | None = None  # logits are cap · tanh(product / cap) before the temperature, as in Gemma 2

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `values` with `op` (default: sum) over the tensor ranks, in place."""
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(values, op=op, group=self.group)
        return values

    def logits(self, hidden_CE: Tensor, weight_VE: Tensor) -> Tensor:
        """Return the logits, divided by the temperature, f32 [C, V]. Padding columns are -inf."""
        logits_CV = self.scaled(raw_logits(hidden_CE, weight_VE))
        if self.real < logits_CV.size(1):
            logits_CV[:, self.real :] = float("-inf")
        return logits_CV

    def scaled(self, logits_CV: Tensor) -> Tensor:
        """Convert raw logits to logits, in place: cap them if there is a cap, and divide them by the temperature."""
        if self.cap is not None:
            logits_CV.div_(self.cap).tanh_().mul_(self.cap)
        return logits_CV if self.inverse_temperature == 1.0 else logits_CV.mul_(self.inverse_temperature)

    def log_normaliser(self, logits_CV: Tensor, picked_CK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (log-normaliser, picked). Collective; may overwrite `logits_CV`.

        - log-normaliser: log Σ exp of the logits over the whole vocabulary, f64 [C]
        - picked: sum of `picked_CK` over the tensor ranks, f64 [C, K]
        """
        if has_kernels(logits_CV):
            from roll_opd.megatron.triton_kernels import peaks_and_sums

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
        """Return log Σ exp over the vocabulary without the columns `taken_CK`, f64 [C].

        The result is -inf if no column remains. Collective; overwrites `logits_CV`.

        The remaining columns are summed directly. Their probability is not computed as 1 minus the probability of the
        taken columns. If the taken columns have a probability close to 1, this difference would have no correct digits.

        `taken_CK`: column numbers, counted from this rank's first column.
        """
        logits_CV.masked_fill_(is_taken(taken_CK, logits_CV.size(1)), float("-inf"))
        largest_C = self.reduce(logits_CV.amax(dim=1), dist.ReduceOp.MAX)
        largest_C = torch.where(largest_C.isfinite(), largest_C, 0)
        sums_C = logits_CV.sub_(largest_C[:, None]).exp_().sum(dim=1, dtype=torch.float64)
        return self.reduce(sums_C).log() + largest_C

    @staticmethod
    def logprobs(logits: Tensor, log_normaliser_C: Tensor) -> Tensor:
        """Subtract the log-normaliser (f64) from `logits`, in place.

        The log-normaliser is split into a high and a low part, which are subtracted one after the other. Near the
        largest logit, the first difference is exact in f32.
        """
        high_C = log_normaliser_C.float()
        return logits.sub_(high_C[:, None]).sub_((log_normaliser_C - high_C).float()[:, None])

    def chunks(self, rows: int, columns: int) -> Iterator[slice]:
        """Yield ranges of rows. The logits of each range fit into a chunk.

        If there are no rows, yield one empty range, because every rank must take part in the collectives.
        """
        step = max(1, self.chunk_bytes // (4 * columns))
        return (slice(start, start + step) for start in range(0, max(rows, 1), step))


@dataclass(frozen=True)
class VocabShard:
    """Output embedding of one tensor rank, with the temperature and the vocabulary size of the softmax."""

    weight_VE: Tensor
    temperature: float  # divides the logits
    vocab_size: int  # columns of all ranks; padding columns are excluded from the softmax
    group: dist.ProcessGroup  # tensor ranks in vocabulary order, each with the same number of rows
    weight_grad_VE: Tensor | None = None  # f32 buffer for the weight's gradient; None: autograd gets the gradient
    chunk_bytes: int | None = None  # bound on f32 logits held at a time; None: `memory.CHUNK_BYTES` of the device
    logit_cap: float | None = None  # see `Columns.cap`

    @property
    def columns(self) -> Columns:
        """Vocabulary columns of this rank."""
        rows = self.weight_VE.size(0)
        first = dist.get_rank(self.group) * rows
        chunk_bytes = self.chunk_bytes or CHUNK_BYTES[self.weight_VE.device.type]
        real = min(max(self.vocab_size - first, 0), rows)
        return Columns(first, real, self.group, 1.0 / self.temperature, chunk_bytes, self.logit_cap)


def raw_logits(hidden_CE: Tensor, weight_VE: Tensor) -> Tensor:
    """Return the product of hidden states and output embedding, f32 [C, V].

    On a GPU, products of bf16 matrices are stored in f32. Rounding to bf16 may change a logit of 16 by 0.06. This is as
    large as the difference between student and teacher at the end of training. On a CPU, torch's kernels return only
    rounded results.
    """
    if hidden_CE.is_cuda and hidden_CE.dtype is not torch.float32:
        return torch.mm(hidden_CE, weight_VE.T, out_dtype=torch.float32)
    return (hidden_CE @ weight_VE.T).float()


def has_kernels(tensor: Tensor) -> bool:
    """Return whether `triton_kernels` computes the softmax.

    It is used only on a GPU. It is not used with torch's deterministic algorithms, because its results may depend on
    the layout.
    """
    return tensor.is_cuda and not torch.are_deterministic_algorithms_enabled()


def is_taken(columns_CK: Tensor, width: int) -> Tensor:
    """Return a mask of the columns in `columns_CK`, bool [C, width].

    Columns of other ranks are ignored.
    """
    mine_CK = (columns_CK >= 0) & (columns_CK < width)
    taken = torch.zeros(len(columns_CK), width + 1, dtype=torch.bool, device=columns_CK.device)
    return taken.scatter_(1, torch.where(mine_CK, columns_CK, width), True)[:, :width]


def backward_through_logits(
    columns: Columns,
    hidden_ME: Tensor,
    weight_VE: Tensor,
    weight_grad_VE: Tensor | None,
    logits_grad: LogitsGradient,
    *,
    weight_trainable: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return (gradient of the hidden states, gradient of the output embedding).

    The logits are computed again, tile by tile.

    Args:
        weight_grad_VE: f32 buffer to which the embedding's gradient is added. The second result is then None.
        logits_grad: function that takes the raw f32 logits of a tile, the rows of the tile and its columns. It returns
            the gradient of these logits, in any dtype, and may overwrite the logits. `tempered` makes such a function
            for logits that are capped or divided by the temperature.
        weight_trainable: if False, no gradient is computed for the embedding, unless `weight_grad_VE` is given.
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
    """Convert a gradient of the final logits to a gradient of the raw logits.

    The final logits are the raw logits, capped if there is a cap, and divided by the temperature.
    """
    scale, cap = columns.inverse_temperature, columns.cap
    if cap is not None:
        return partial(_through_cap, logits_grad, cap, scale)
    if scale == 1.0:
        return logits_grad
    return lambda logits_CV, rows, part: logits_grad(logits_CV.mul_(scale), rows, part).mul_(scale)


def _through_cap(
    logits_grad: LogitsGradient, cap: float, scale: float, logits_CV: Tensor, rows: slice, part: slice
) -> Tensor:
    """Convert a gradient of the logits cap · tanh(raw / cap) · scale to a gradient of the raw logits."""
    tanh_CV = logits_CV.div_(cap).tanh_()
    grad_CV = logits_grad(tanh_CV * (cap * scale), rows, part)
    return grad_CV.mul_(tanh_CV.square_().neg_().add_(1.0)).mul_(scale)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)  # in place, without a temporary of the size of `total`
    elif total.is_cuda:  # accumulates bf16 products in f32
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
