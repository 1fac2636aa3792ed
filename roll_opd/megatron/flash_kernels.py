"""Flash attention over packs on GPUs.

The environment variable `VARIABLE` chooses the kernel: torch's, or the kernel of a flash-attn package.

Legend: N packed tokens, X tokens of the expanded sequences (see `PackedSequences`), H local query heads, G local
key/value heads, D head width.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from roll_opd.megatron.packing import PackedSequences

VARIABLE = "ROLL_OPD_FLASH_ATTENTION"  # its value is a name in `KERNELS`; set it in the system_envs of a run or role
DEFAULT = "torch"
WIDTH_MULTIPLE = 8  # all kernels need head widths that are multiples of this


@dataclass(frozen=True)
class FlashKernel:
    """A flash attention kernel: its package, and which tensors it supports."""

    module: str | None  # module that has `flash_attn_varlen_func`; None: torch
    package: str  # name of the package, for messages
    majors: range  # supported major versions of the compute capability
    max_width: int  # largest supported head width


# sources: torch 2.11 to 2.13; flash_attn_interface.py, hopper/flash_attn_interface.py and flash_attn/cute/interface.py
# of flash-attn 2.8 (the last supports wider heads only on some architectures)
KERNELS = {
    "torch": FlashKernel(None, "torch", range(8, 100), 256),
    "flash2": FlashKernel("flash_attn", "flash-attn", range(8, 100), 256),
    "flash3": FlashKernel("flash_attn_interface", "flash-attn 3 (hopper/)", range(9, 10), 256),
    "flash4": FlashKernel("flash_attn.cute", "flash-attn-4", range(9, 13), 128),
}


def chosen_kernel() -> FlashKernel:
    """Return the kernel that this process uses. Raises ValueError if `VARIABLE` has an unknown name."""
    name = os.environ.get(VARIABLE) or DEFAULT
    if name not in KERNELS:
        raise ValueError(f"{VARIABLE}={name} is not a known kernel; use one of {', '.join(KERNELS)}")
    return KERNELS[name]


def check_kernel(capability: tuple[int, int]) -> None:
    """Raise ValueError if the chosen kernel cannot be imported or does not support the device's compute capability."""
    kernel = chosen_kernel()
    if kernel.module is None:
        return
    asked = f"{VARIABLE}={os.environ[VARIABLE]}"
    if capability[0] not in kernel.majors:
        raise ValueError(
            f"{asked}: {kernel.package} does not support compute capability {capability[0]}.{capability[1]}; "
            f"remove the variable to use torch's kernel"
        )
    try:
        _varlen_function(kernel.module)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(
            f"{asked}: {kernel.package} cannot be imported ({error}); install this package (docs/gpu.md)"
        ) from error


def uses_flash_attention(query_NHD: Tensor, value_NGD: Tensor, pack: PackedSequences) -> bool:
    """Whether a flash attention kernel supports these tensors.

    All kernels need complete sequences on this rank, so context parallelism is not supported.
    """
    width = query_NHD.size(-1)
    return (
        query_NHD.is_cuda
        and query_NHD.dtype in (torch.bfloat16, torch.float16)
        and value_NGD.size(-1) == width
        and width % WIDTH_MULTIPLE == 0
        and width <= KERNELS[DEFAULT].max_width
        and pack.context.ranks == 1
        and _runs_on(_kernel_for(width), query_NHD.device)
    )


def _kernel_for(width: int) -> FlashKernel:
    """Return the chosen kernel, or torch's kernel if the heads are too wide for the chosen kernel."""
    kernel = chosen_kernel()
    return kernel if width <= kernel.max_width else KERNELS[DEFAULT]


@cache
def _runs_on(kernel: FlashKernel, device: torch.device) -> bool:
    has_kernel = kernel.module is not None or torch.backends.cuda.is_flash_attention_available()
    return has_kernel and torch.cuda.get_device_capability(device)[0] in kernel.majors


def flash_attention(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, pack: PackedSequences, scale: float, window: int = 0
) -> Tensor:
    """Return the attention output, [N, H, D]. It has a gradient.

    The output is computed without padding or scattering. The queries of a sequence are its unshared tokens, which are
    contiguous in the pack. Keys are gathered only if there are shared prefixes. In the causal mask, all kernels align
    the last query with the last key.

    `window` is the number of keys that a query sees, including its own key. 0 means that the number of keys is not
    limited. Layers with a window use torch's kernel.
    """
    own, whole = pack.own, pack.whole
    assert own is not None and whole is not None
    if pack.places_X is not None:
        key_NGD, value_NGD = (tensor.index_select(0, pack.places_X) for tensor in (key_NGD, value_NGD))
    if window:
        return _torch_kernel(query_NHD, key_NGD, value_NGD, own, whole, scale, window)
    module = _kernel_for(query_NHD.size(-1)).module
    attend = _torch_kernel if module is None else _package_kernel(module)
    return attend(query_NHD, key_NGD, value_NGD, own, whole, scale)


def _torch_kernel(
    query_NHD: Tensor,
    key_XGD: Tensor,
    value_XGD: Tensor,
    own: PackedSeqParams,
    whole: PackedSeqParams,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Return the attention outputs of packed queries, [N, H, D].

    - `own`: segments of the queries.
    - `whole`: segments of the keys. Segment i of the queries and segment i of the keys end at the same token.

    `torch.nn.attention.varlen` calls the same operator.
    """
    lengths = own.cu_seqlens_q, whole.cu_seqlens_kv, own.max_seqlen_q, whole.max_seqlen_kv
    no_dropout, is_causal, returns_mask = 0.0, True, False
    settings = (*lengths, no_dropout, is_causal, returns_mask)
    limits = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    kernel = torch.ops.aten._flash_attention_forward
    return kernel(query_NHD, key_XGD, value_XGD, *settings, scale=scale, **limits)[0]


def _package_kernel(module: str) -> Callable[..., Tensor]:
    """Return a function like `_torch_kernel` that calls `flash_attn_varlen_func` of a flash-attn module."""
    attend = _varlen_function(module)

    def call(
        query_NHD: Tensor,
        key_XGD: Tensor,
        value_XGD: Tensor,
        own: PackedSeqParams,
        whole: PackedSeqParams,
        scale: float,
    ) -> Tensor:
        found = attend(
            query_NHD,
            key_XGD,
            value_XGD,
            cu_seqlens_q=own.cu_seqlens_q,
            cu_seqlens_k=whole.cu_seqlens_kv,
            max_seqlen_q=own.max_seqlen_q,
            max_seqlen_k=whole.max_seqlen_kv,
            softmax_scale=scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        # some releases also return the log-sum-exp
        return found[0] if isinstance(found, tuple) else found

    return call


@cache
def _varlen_function(module: str) -> Any:
    return importlib.import_module(module).flash_attn_varlen_func
