"""Loading of gpt-oss's attention sinks during a weight update of a running vLLM engine."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

MODEL = "GptOssModel"  # vLLM's class
SINKS = ".sinks"


def load_sinks_by_loader(model: torch.nn.Module) -> None:
    """Make the model load its attention sinks with the weight loader of their parameter. Idempotent.

    A layerwise reload requires this weight loader. vLLM 0.32 instead copies the sinks directly into the parameter.
    During a reload, the parameter is on the meta device, so the direct copy has no effect.
    """
    for module in model.modules():
        inner: Any = module
        if type(inner).__name__ == MODEL and not hasattr(inner, "load_without_sinks"):
            inner.load_without_sinks = inner.load_weights
            inner.load_weights = partial(_load, inner)


def _load(model: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    parameters, loaded = dict(model.named_parameters()), set()

    def others() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if not name.endswith(SINKS):
                yield name, tensor
                continue
            parameter = parameters[name]
            heads = len(parameter)
            own = tensor.narrow(0, heads * get_tensor_model_parallel_rank(), heads)
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, own)
            loaded.add(name)

    return set(model.load_without_sinks(others())) | loaded
