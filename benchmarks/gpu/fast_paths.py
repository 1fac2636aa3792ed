"""The fast paths of the engine on GPUs; a benchmark can disable each of them in a running rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def without(names: Sequence[str], rank: Any) -> Iterator[None]:
    """Disable fast paths while the context is open."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(PATHS[name](rank))
        yield


def _never(*_: Any) -> bool:
    return False


@contextmanager
def _attention(_: Any) -> Iterator[None]:
    from roll_opd.megatron import attention

    with mock.patch.object(attention, "uses_flash_attention", _never):
        yield


@contextmanager
def _softmax(_: Any) -> Iterator[None]:
    from roll_opd.megatron import logprobs_and_topk, vocabulary

    rows = mock.patch.dict(vocabulary.TILE_ROWS, cuda=vocabulary.TILE_ROWS["cpu"])
    with (
        mock.patch.object(vocabulary, "has_kernels", _never),
        mock.patch.object(logprobs_and_topk, "has_kernels", _never),
        rows,
    ):
        yield


@contextmanager
def _heads(rank: Any) -> Iterator[None]:
    from megatron.core.transformer.attention import SelfAttention

    from roll_opd.megatron.local_layers import PackedSelfAttention

    with _as_megatrons(rank, PackedSelfAttention, SelfAttention):
        yield


@contextmanager
def _layers(rank: Any) -> Iterator[None]:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from roll_opd.megatron.local_layers import DenseLayer

    with _as_megatrons(rank, DenseLayer, TransformerLayer):
        yield


@contextmanager
def _as_megatrons(rank: Any, ours: type, theirs: type) -> Iterator[None]:
    found = [module for module in _modules(rank) if type(module) is ours]
    for module in found:
        module.__class__ = theirs
    try:
        yield
    finally:
        for module in found:
            module.__class__ = ours


@contextmanager
def _products(rank: Any) -> Iterator[None]:
    found = [module for module in _modules(rank) if getattr(module, "gradient_accumulation_fusion", False)]
    for module in found:
        module.gradient_accumulation_fusion = False
    try:
        yield
    finally:
        for module in found:
            module.gradient_accumulation_fusion = True


@contextmanager
def _optimizer(rank: Any) -> Iterator[None]:
    every = [each.optimizer for each in getattr(getattr(rank, "optimizer", None), "chained_optimizers", ())]
    fused = [one for one in every if one.param_groups[0].get("fused")]
    _counted(fused, "cpu", {"fused": None, "foreach": None})
    try:
        yield
    finally:
        _counted(fused, rank.device, {"fused": True, "foreach": False})


def _counted(optimizers: Sequence[Any], device: Any, settings: dict[str, Any]) -> None:
    """Set the implementation of AdamW, and where it counts its steps."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group |= settings
        for values in optimizer.state.values():
            values["step"] = values["step"].to(device)


@contextmanager
def _norm(_: Any) -> Iterator[None]:
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    norm = mock.patch.object(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    with norm, mock.patch.object(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale):
        yield


def _modules(rank: Any) -> list[Any]:
    return [module for chunk in rank.chunks for module in chunk.modules()]


PATHS: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "attention": _attention,
    "softmax": _softmax,
    "heads": _heads,
    "layers": _layers,
    "products": _products,
    "optimizer": _optimizer,
    "norm": _norm,
}
