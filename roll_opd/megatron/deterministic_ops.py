"""f32 arithmetic whose last bits do not depend on the layout.

The same weights under two layouts should give the same log-probs: a difference would be taken for a KL. Two things make
the last bits depend on how a model is cut: the order of sums over a dimension that ranks share, and the elements that a
vector unit leaves over, for which another (scalar) routine computes exp. In f32, in which numerics are proven,
both are avoided here. Other dtypes are for speed and use the usual kernels.

Legend: N packed tokens, P pieces of an inner dimension, each K wide, O output features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

VECTOR = 32  # f32 elements of torch's vectorised loops (two registers of 512 bits); multiples leave nothing over


class ExactRowParallelLinear(RowParallelLinear):
    """A row-parallel linear layer whose f32 result does not depend on how many ranks share it.

    The product is always formed in as many pieces as there are key/value heads, the most that tensor parallelism may
    cut a layer into, and pieces and ranks are summed in f64.
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
        """Return Megatron's forward, with the result in the dtype of `input_`."""
        output, bias = super().forward(input_)
        return output.to(input_.dtype), bias


def exact_silu(hf_config: PretrainedConfig) -> Callable[[Tensor], Tensor]:
    """Return SiLU for f32; in f64 inside, where the finest cut of the MLP is no multiple of `VECTOR`."""
    finest = hf_config.intermediate_size // hf_config.num_key_value_heads
    if finest % VECTOR == 0:
        return F.silu
    return lambda x: F.silu(x.double()).to(x.dtype)
