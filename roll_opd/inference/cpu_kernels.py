"""Corrections of vLLM's kernels for CPUs. `plugin` applies them in vLLM's processes.

With vLLM 0.32, a step of linear attention with a single token crashes the engine, and speculation draws wrong tokens.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

    def with_copy(layer: Any, metadata: Any, mixed_qkv: "Tensor", *rest: "Tensor") -> None:
        # a new tensor has the strides of its shape
        projections = mixed_qkv.new_empty(mixed_qkv.shape).copy_(mixed_qkv) if len(mixed_qkv) == 1 else mixed_qkv
        compute(layer, metadata, projections, *rest)

    with_copy.copies = True  # type: ignore[attr-defined]
    module._cpu_gdn_attention_nonspec = with_copy


def expands_all_types() -> None:
    """Patch vLLM's rejection sampler to divide the logits of drafts by the temperature of their request. Idempotent.

    vLLM's kernel knows only int64. A temperature (f32), top-k (int32) or top-p (f32) is converted, and the result is
    written to the converted copy, so that the sampler reads uninitialised memory.
    """
    from vllm.utils import cpu_triton_utils

    module: Any = cpu_triton_utils
    module._expand_kernel_impl = expanded


def expanded(
    output_M: "Tensor", values_S: "Tensor", ends_S: "Tensor", replaced: float, by: float, longest: int | None = None
) -> None:
    """Write the value of each sequence to the places of its tokens; the value `replaced` becomes `by`.

    `longest` (tokens of the longest sequence) is part of the signature of vLLM's kernel and has no use here.
    """
    lengths_S = ends_S.diff(prepend=ends_S.new_zeros(1))
    output_M.copy_(values_S.masked_fill(values_S == replaced, by).repeat_interleave(lengths_S))
