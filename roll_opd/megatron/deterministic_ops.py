"""f32 operations whose bits do not depend on the parallel layout.

The same weights under two layouts should give the same log-probs, because a difference would look like a KL divergence.
Two effects make the last bits depend on the layout:

- the order of sums over a sharded dimension;
- the remainder of a vectorised loop, because torch computes exp of the remaining elements with a scalar routine.

In f32, the dtype of the numerical tests, this module avoids both effects. Other dtypes use the usual, faster kernels.

Legend: N packed tokens, P pieces of an inner dimension, K width of a piece, O output features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

VECTOR = 32  # f32 elements per step of torch's vectorised loops (two 512-bit registers); multiples have no remainder


class ExactRowParallelLinear(RowParallelLinear):
    """Row-parallel linear layer whose f32 result does not depend on the number of tensor ranks.

    The product is computed in pieces, and the pieces of all ranks are summed in f64. The number of pieces is the number
    of key/value heads, because this is the largest possible tensor-parallel size.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        assert isinstance(config, TransformerConfig) and config.num_query_groups is not None  # Megatron fills it in
        pieces = config.num_query_groups // config.tensor_model_parallel_size
        exact = config.params_dtype is torch.float32 and self.input_size_per_partition % pieces == 0
        self._pieces = pieces if exact else None

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._pieces is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        rows, width = input.flatten(0, -2), input.size(-1) // self._pieces
        input_PNK = rows.view(rows.size(0), self._pieces, width).transpose(0, 1)
        weight_PKO = weight.view(weight.size(0), self._pieces, width).permute(1, 2, 0)
        product = torch.bmm(input_PNK, weight_PKO).sum(0, dtype=torch.float64)
        return product.view(*input.shape[:-1], -1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias), as Megatron's layer does. The output has the dtype of `input_`."""
        output, bias = super().forward(input_)
        return output.to(input_.dtype), bias


def exact_silu(hf_config: PretrainedConfig) -> Callable[[Tensor], Tensor]:
    """Return the SiLU function for f32.

    The function computes in f64 if the width of the MLP's smallest shard is not a multiple of `VECTOR`.
    """
    width = getattr(hf_config, "intermediate_size", None) or hf_config.moe_intermediate_size
    smallest_shard = width // hf_config.num_key_value_heads
    if smallest_shard % VECTOR == 0:
        return F.silu
    return lambda x: F.silu(x.double()).to(x.dtype)
