"""The norm of local layers, which sequence parallelism may be used with; megatron-core's stock one refuses it."""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class LocalRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked, so that Megatron sums its gradient over tensor ranks (sequence parallelism)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel
