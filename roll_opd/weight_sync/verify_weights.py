"""Verify that a vLLM model has received all weights of an update.

The verification runs in vLLM's engine core and in every tensor-parallel worker. Norms and embeddings are compared with
the sent tensors by fingerprints, without a tolerance. The matrices of linear layers cannot be compared, because vLLM
fuses, packs or shards them. For these matrices, the received values are counted.

gpt-oss's attention sinks need a loader of their own during an update, which is here too.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from roll_opd.samples.weight_bucket import Sent, row_checksums, sampled_rows, sent_checksums, sent_tensors


class WeightVerifier:
    """Verifies one weight update. A verifier must be created before the layerwise reload starts."""

    def __init__(self, model: torch.nn.Module) -> None:
        # this logger warns of layers without weights at every update; `incomplete_layers` checks these layers instead
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._model = model
        self._sent: dict[str, Sent] = {}
        self._version = 0
        self._tied_heads = tied_heads(model)
        self._mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
        reset_expert_kernels(model)

    def expect(self, entries: Sequence[dict[str, Any]], version: int) -> None:
        """Record the entries of sent stacks. Raises ValueError if a tensor was sent twice."""
        names = Counter(name for entry in entries for name in entry["names"])
        found = sent_tensors(entries)
        if repeated := sorted(name for name, times in names.items() if times > 1 or name in self._sent):
            raise ValueError(f"weights sent twice in one update: {_listed(repeated)}")
        self._sent |= found
        for name, sent in found.items() if self._mapper else ():  # the model's modules may have other names
            self._sent.setdefault(self._mapper.map_name(name) or name, sent)
        self._version = version

    def finish(self, finalize: Callable[[], None], received: Collection[str] = ()) -> int:
        """End the layerwise reload by calling `finalize`, and verify the model. Return the new version of the weights.

        Raises a RuntimeError that names missing or different weights. `received`: names of layers whose weights did not
        pass through the reload.
        """
        exempt = {name for name, _ in self._tied_heads}.union(received)
        incomplete = incomplete_layers(self._model, set(self._sent), exempt)
        finalize()
        for _, head in self._tied_heads:
            # reload updates only the embedding; on CPUs the packed copy of a tied head is now stale
            head.quant_method.process_weights_after_loading(head)
        if incomplete:
            raise RuntimeError(f"weights version {self._version} did not arrive: {_listed(incomplete)}")
        verify_model(self._model, self._sent, self._version)
        return self._version


def clone_pending(model: torch.nn.Module, memory: torch.Tensor) -> None:
    """Clone those tensors in a bucket that incomplete layers still need.

    Call this function before the bucket is overwritten. `memory` is the mapped bucket, uint8.
    """
    first = memory.data_ptr()
    for layer in model.modules():
        for _, arguments in get_layerwise_info(layer).loaded_weights:
            for name, value in arguments.arguments.items():
                if isinstance(value, torch.Tensor) and first <= value.data_ptr() < first + memory.numel():
                    arguments.arguments[name] = value.clone()


def tied_heads(model: torch.nn.Module) -> list[tuple[str, ParallelLMHead]]:
    """Return (module name, head) for each output head that shares its weight with an embedding."""
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings
    ]


def reset_expert_kernels(model: torch.nn.Module) -> None:
    """Reset the CPU kernels of expert layers, so that vLLM packs the new weights after an update.

    vLLM packs the weights of a layer only when it creates the kernel of the layer. Without the reset, the new values
    would be copied into the packed memory without being packed.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "unquantized_backend", None) is UnquantizedMoeBackend.CPU:
            assert method is not None
            method.moe_kernel = None


def incomplete_layers(model: torch.nn.Module, sent: set[str], exempt: set[str]) -> list[str]:
    """Return each layer with missing values as text, for example "model.norm (10 of 64 values)".

    Call this function before the reload is finalized.

    Args:
        model: the vLLM model.
        sent: names of all sent tensors.
        exempt: names of layers that are not checked.
    """
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if name in exempt or not info.can_load():  # a complete layer accepts no more weights
            continue
        if isinstance(layer, VocabParallelEmbedding):  # padding rows never arrive: check whether the weight was sent
            if f"{name}.weight" not in sent:
                missing.append(f"{name} (not sent)")
            continue
        expected = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        if info.load_numel < expected:
            missing.append(f"{name} ({info.load_numel} of {expected} values)")
    return missing


def verify_model(model: torch.nn.Module, sent: dict[str, Sent], version: int) -> None:
    """Compare the model's vectors and embeddings with the sent tensors by fingerprints.

    Matrices of linear layers are not compared, because vLLM fuses, packs or shards them. Raises RuntimeError if a value
    differs, or if no tensor could be compared.

    Args:
        model: the vLLM model.
        sent: the sent tensors by name.
        version: version of the weights, for error messages.
    """
    compared, different = 0, []
    for layer_name, layer in model.named_modules():
        for parameter_name, parameter in layer.named_parameters(recurse=False):
            name = f"{layer_name}.{parameter_name}"
            if name not in sent:
                continue
            same = matches_fingerprint(layer, parameter, sent[name])
            compared += same is not None
            if same is False:
                different.append(name)
    if different:
        raise RuntimeError(f"weights version {version}: the model differs from the sent weights: {_listed(different)}")
    if not compared:
        raise RuntimeError(
            f"weights version {version} cannot be verified: of the {len(sent)} tensors sent, none has a "
            f"counterpart of the same name, shape and dtype in {type(model).__name__}; sent: {_listed(sorted(sent))}"
        )


def matches_fingerprint(layer: torch.nn.Module, parameter: torch.Tensor, sent: Sent) -> bool | None:
    """Return whether a parameter has the fingerprint of a sent tensor. Return None if the two cannot be compared."""
    expected = sent_checksums(sent, str(parameter.dtype).removeprefix("torch."))
    shape = sent[0]["shape"]
    if expected is None or parameter.ndim != len(shape):
        return None
    if parameter.ndim == 1:
        return None if list(parameter.shape) != shape else row_checksums(parameter[None], [0]) == expected
    if not isinstance(layer, VocabParallelEmbedding) or list(parameter.shape[1:]) != shape[1:]:
        return None
    first = layer.shard_indices.org_vocab_start_index
    last = layer.shard_indices.org_vocab_end_index  # exclusive
    here = [
        (row - first, value) for row, value in zip(sampled_rows(shape[0]), expected, strict=True) if first <= row < last
    ]
    if not here:
        return None
    return row_checksums(parameter, [row for row, _ in here]) == [value for _, value in here]


def _listed(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


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
