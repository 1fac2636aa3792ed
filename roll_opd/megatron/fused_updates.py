"""Fused weight gradients, gradient norm and AdamW on GPUs without Apex or Transformer Engine.

The fused versions consist of torch operations. Without Apex and Transformer Engine, Megatron's own versions are slower:
a weight gradient takes two more passes over memory, the gradient norm takes one synchronisation per parameter, and
AdamW takes about ten passes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor


class WeightGradientKernels:
    """Replacement of Apex's module, with the same function names.

    The matrix product accumulates into the f32 gradient.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(input_nI: Tensor, grad_nO: Tensor, total_OI: Tensor) -> None:
        """Add the product grad_nO.T @ input_nI to `total_OI`."""
        if len(input_nI):  # experts may have no tokens
            torch.addmm(total_OI, grad_nO.t(), input_nI, out_dtype=torch.float32, out=total_OI)


def fuse_weight_gradients() -> None:
    """Enable `gradient_accumulation_fusion` of Megatron's linear layers in this process (bf16 and fp16 on a GPU)."""
    megatron: Any = layers
    if not megatron._grad_accum_fusion_available:
        megatron.fused_weight_gradient_mlp_cuda = WeightGradientKernels
        megatron._grad_accum_fusion_available = True


def fuse_gradient_norm() -> None:
    """Replace Megatron's functions for the norm and the scaling of gradients.

    Megatron's functions synchronise the device once per parameter. The replacements do not.
    """
    megatron: Any = clip_grads
    if megatron.l2_norm_impl is local_multi_tensor_l2_norm:
        megatron.l2_norm_impl = _norm
    if megatron.multi_tensor_scale_impl is local_multi_tensor_scale:
        megatron.multi_tensor_scale_impl = _scale


def _norm(_chunk: int, _flag: Tensor, tensor_lists: Sequence[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """Return the joint norm of all tensors, f32 [1]."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms))[None], None


def _scale(_chunk: int, _flag: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float) -> None:
    """Multiply the tensors of the first list by `scale`, and write the products to the tensors of the second list."""
    sources, targets = tensor_lists
    if targets is not sources:
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, scale)


def fuse_adamw(optimizer: Any) -> None:
    """Switch torch's AdamW on a GPU to its fused implementation. Other optimizers are not changed."""
    if isinstance(optimizer, torch.optim.AdamW):
        for group in optimizer.param_groups:
            if all(parameter.is_cuda for parameter in group["params"]):
                group |= {"fused": True, "foreach": False}
