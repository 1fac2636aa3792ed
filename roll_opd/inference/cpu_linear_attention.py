"""Fix vLLM 0.32's linear attention on CPUs, where a step with a single token crashes the engine."""

from typing import Any

from torch import Tensor


def copies_single_tokens() -> None:
    """Patch vLLM's linear attention to copy the projections of a single token. Idempotent.

    PyTorch treats a single row of a wider matrix as contiguous, whatever its strides are. The convolution kernel reads
    the strides, so it needs a copy with the strides of a single row.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    module: Any = gdn_attention
    compute = module._cpu_gdn_attention_nonspec
    if getattr(compute, "copies", False):
        return

    def with_copy(layer: Any, metadata: Any, mixed_qkv: Tensor, *rest: Tensor) -> None:
        # a new tensor has the strides of its shape
        projections = mixed_qkv.new_empty(mixed_qkv.shape).copy_(mixed_qkv) if len(mixed_qkv) == 1 else mixed_qkv
        compute(layer, metadata, projections, *rest)

    with_copy.copies = True  # type: ignore[attr-defined]
    module._cpu_gdn_attention_nonspec = with_copy
