"""Gradients of weights, their norm and AdamW on GPUs by torch, for Megatron without Apex and Transformer Engine.

Otherwise Megatron adds a weight's gradient in two more passes, waits for the GPU once a parameter to know the norm
of the gradients, and runs AdamW in some ten passes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor


class WeightGradients:
    """Stands in for Apex's module of the same functions: a weight's gradient is added to the f32 one by the product."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_nI: Tensor, grad_nO: Tensor, total_OI: Tensor) -> None:
        """Add grad.T @ input to `total_OI`."""
        if len(input_nI):  # an expert may have no tokens
            torch.addmm(total_OI, grad_nO.t(), input_nI, out_dtype=torch.float32, out=total_OI)


def add_gradients_in_products() -> None:
    """Let Megatron's linear layers have `gradient_accumulation_fusion` in this process, for bf16 and fp16 on a GPU."""
    megatron: Any = layers
    if not megatron._grad_accum_fusion_available:
        megatron.fused_weight_gradient_mlp_cuda = WeightGradients
        megatron._grad_accum_fusion_available = True


def norm_in_one_pass() -> None:
    """Have Megatron compute the norm of the gradients, and scale them, without waiting in between."""
    megatron: Any = clip_grads
    if megatron.l2_norm_impl is local_multi_tensor_l2_norm:
        megatron.l2_norm_impl = _norm
    if megatron.multi_tensor_scale_impl is local_multi_tensor_scale:
        megatron.multi_tensor_scale_impl = _scale


def _norm(_chunk: int, _flag: Tensor, tensor_lists: Sequence[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """Return the norm of all tensors together, f32 [1]."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms))[None], None


def _scale(_chunk: int, _flag: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float) -> None:
    """Write the first tensors times `scale` to the second ones."""
    sources, targets = tensor_lists
    if targets is not sources:
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, scale)


def fuse(optimizer: Any) -> None:
    """Have torch's AdamW update weights and moments on a GPU in one pass; other optimizers are left as they are."""
    if isinstance(optimizer, torch.optim.AdamW):
        for group in optimizer.param_groups:
            if all(parameter.is_cuda for parameter in group["params"]):
                group |= {"fused": True, "foreach": False}
