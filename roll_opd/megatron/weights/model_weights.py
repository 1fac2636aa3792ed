"""Weights of a Megatron model by Hugging Face name: loaded from files or from streamed tensors, and exported.

When weights are loaded from files, each rank reads only its parts.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from roll_opd.megatron.lora import ADAPTER, Adapter, LinearLayer, module_name
from roll_opd.megatron.parallel import tensor_rank
from roll_opd.megatron.weights.source import FileSource, TensorSource
from roll_opd.megatron.weights.sync_plan import ParameterShard, SyncPlan
from roll_opd.megatron.weights.tensor_slices import SLICINGS, SliceSizes, SliceSource
from roll_opd.models.families import FAMILIES
from roll_opd.models.families.family_definition import layer_entries
from roll_opd.models.families.parameter_names import Entry
from roll_opd.models.families.qwen_hybrid import delta_sizes
from roll_opd.models.model_files import IN_A_LAYER
from roll_opd.models.weight_files import BUFFERS, EMBEDDING, FINAL_NORM, HEAD, VALUE_HEAD, may_be_zero

ENDS = {
    "embedding.word_embeddings.weight": Entry((EMBEDDING,), "vocabulary"),
    "output_layer.weight": Entry((HEAD,), "vocabulary"),
    "decoder.final_layernorm.weight": Entry((FINAL_NORM,), "replicated"),
    "value_head.weight": Entry((VALUE_HEAD,), "replicated"),  # only in critics; named as in sequence classifiers
}
SAMPLED_ROWS = 64  # evenly spaced rows of a matrix that are checked for zeros
IN_DECODER = "decoder.layers."
EXPERT = re.compile(r"(?<=local_experts)\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """Identity of a parameter.

    - name: the name in its layer, or in the model if the parameter is outside of the layers
    - layer and expert: global indices, counted from 0

    In the name of an expert's parameter, a star replaces the index of the expert.
    """

    name: str
    layer: int | None = None
    expert: int | None = None


class ModelWeights:
    """Mapping between Hugging Face tensors and a model's parameters, in any layout.

    - `config`: Megatron's configuration
    - `prefix`: prefix of the decoder's tensor names
    """

    def __init__(
        self, hf_config: PretrainedConfig, config: TransformerConfig, padded_vocab: int, prefix: str = "model."
    ) -> None:
        self.config, self.padded_vocab = config, padded_vocab
        family = FAMILIES[hf_config.model_type]
        pieces = family.pieces(hf_config.to_dict())
        self._zero_centred = pieces.zero_centred_norms
        entries = layer_entries(family.tensors, pieces)
        self._layer = {place: entry.under(prefix) for place, entry in entries.items()}
        self._ends = {place: entry.under(prefix) for place, entry in ENDS.items()}
        self._predicting_layers = getattr(hf_config, "num_nextn_predict_layers", 0) or 0
        self._tied = bool(hf_config.tie_word_embeddings)
        self.sizes = SliceSizes(
            hf_config.num_attention_heads,
            hf_config.num_key_value_heads,
            hf_config.vocab_size,
            padded_vocab,
            delta_sizes(hf_config.to_dict()),
        )

    def load(self, models: Sequence[torch.nn.Module], source: FileSource | TensorSource) -> None:
        """Load the parameters of this rank's model chunks from `source`.

        Raises:
            ValueError: if a tensor is missing, is unknown, has a wrong shape, or is zero in at least half of its rows.
        """
        self._check_names(source)
        read_from = CheckedSource(source, self._zero_centred) if isinstance(source, FileSource) else source
        for place, _, parameter in parameters_of(models):
            names = self.names_at(place)
            part = self.part_at(place, read_from)
            if part.shape != parameter.shape:
                raise ValueError(
                    f"{source}: {' and '.join(names)} have shape {list(part.shape)} on this rank, but config.json"
                    f" implies {list(parameter.shape)}; use the config.json of the same release"
                )
            with torch.no_grad():
                parameter.copy_(part)

    def names_at(self, place: Place) -> Sequence[str]:
        """Return the names of the Hugging Face tensors that make up a parameter."""
        return self._entry(place).of(place.layer, place.expert)

    def part_at(self, place: Place, source: SliceSource) -> Tensor:
        """Read this rank's part of a parameter from `source`."""
        entry = self._entry(place)
        rank, ranks = tensor_rank(expert=entry.is_expert)
        return SLICINGS[entry.slicing].read(source, self.names_at(place), rank, ranks, self.sizes)

    def sync_plan(self, models: Sequence[torch.nn.Module]) -> SyncPlan:
        """Return the plan of the full tensors of this model, with adapters merged. Collective."""
        shards = []
        for place, module, parameter in parameters_of(models):
            entry = self._entry(place)
            names, slicing = self._names_of_peers(place), SLICINGS[entry.slicing]
            shard = ParameterShard(names, slicing, parameter.shape, parameter.dtype, entry.is_expert)
            shards.append((shard, partial(with_adapter, module, parameter)))
        return SyncPlan(shards, self.sizes)

    def linear_layers(
        self, models: Sequence[torch.nn.Module], targets: Collection[str], source: FileSource
    ) -> list[LinearLayer]:
        """Return this rank's linear layers that contain a target of LoRA.

        `targets`: names of Hugging Face modules, such as q_proj.
        """
        found = []
        for place, module, parameter in parameters_of(models):
            entry = self._entry(place)
            tensors = entry.of(place.layer, place.expert)
            names = tuple(name.removesuffix(".weight") for name in tensors)
            if parameter.dim() == 2 and any(module_name(name) in targets for name in names):
                shapes = tuple(map(source.shape, tensors))
                peers = self._names_of_peers(place) if entry.is_expert else ()
                of_peers = tuple(tuple(name.removesuffix(".weight") for name in peer) for peer in peers)
                found.append(LinearLayer(module, names, shapes, SLICINGS[entry.slicing], of_peers))
        return found

    def _names_of_peers(self, place: Place) -> tuple[tuple[str, ...], ...]:
        """Return the names of a parameter's tensors; of an expert's parameter, those of each expert rank."""
        experts = [None] if place.expert is None else _peers_of_expert(place.expert, self.config)
        return tuple(self._entry(place).of(place.layer, expert) for expert in experts)

    def _entry(self, place: Place) -> Entry:
        if self._tied and place.name == "output_layer.weight":
            return self._ends["embedding.word_embeddings.weight"]
        known = self._ends if place.layer is None else self._layer
        if place.name not in known:
            raise ValueError(f"Megatron parameter {place.name} has no entry in its family's file; add an entry")
        return known[place.name]

    def _check_names(self, source: FileSource | TensorSource) -> None:
        """Raise ValueError if a tensor in a layer belongs to no parameter of this model.

        Without this check, the tensor would be ignored.
        """
        known: set[str] = set()
        for entry in self._layer.values():
            experts = range(self.config.num_moe_experts or 0) if entry.is_expert else [None]
            for layer, expert in product(range(self.config.num_layers), experts):
                known.update(entry.of(layer, expert))
        in_layers = [name for name in source.names if self._is_in_a_layer(name) and not name.endswith(BUFFERS)]
        if unknown := [name for name in in_layers if name not in known]:
            names = ", ".join(unknown[:3])
            raise ValueError(f"{source}: no parameter for {names}; use the config.json of the same release")

    def _is_in_a_layer(self, name: str) -> bool:
        """Return whether a tensor belongs to a layer of this model.

        Layers for multi-token prediction do not count. They follow the last layer of the model.
        """
        match = IN_A_LAYER.match(name)
        extra = range(self.config.num_layers, self.config.num_layers + self._predicting_layers)
        return match is not None and int(match[1]) not in extra


@dataclass(frozen=True)
class CheckedSource:
    """SliceSource that checks each tensor when it is read.

    Raises ValueError if the tensor is zero in at least half of its rows.
    """

    source: FileSource | TensorSource
    zero_centred: bool = False  # norms multiply by 1 + weight

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        piece = self.source.part(name, dim, start, stop)
        if may_be_zero(name, zero_centred=self.zero_centred):
            return piece
        if is_zeroed(name, piece) and is_zeroed(name, self.source.part(name, 0, 0, self.shape(name)[0])):
            raise ValueError(f"{self.source}: {name} is zero in at least half of its rows; download the model again")
        return piece


def is_zeroed(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is zero in at least half of its rows. Large tensors are sampled.

    Without this check, such weights would not cause an error, only wrong results. Biases may be zero. Some rows of the
    embedding and the head may be zero too, so these two count as zeroed only if all their rows are zero.
    """
    if may_be_zero(name) or not tensor.numel():
        return False
    if name in (EMBEDDING, HEAD):
        return not tensor.any()
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[None]
    sampled = rows[:: -(-len(rows) // SAMPLED_ROWS)].any(1)
    return 2 * int(sampled.sum()) <= len(sampled)


def _peers_of_expert(expert: int, config: TransformerConfig) -> list[int]:
    """Return, for each expert rank, the expert that has the same local index as `expert`."""
    assert config.num_moe_experts
    ranks = config.expert_model_parallel_size
    each = config.num_moe_experts // ranks
    return [expert % each + rank * each for rank in range(ranks)]


def with_adapter(module: torch.nn.Module, parameter: Tensor) -> Tensor:
    """Return a parameter of `module`. If the module has an adapter, the adapter is merged into the result."""
    adapter = module._modules.get(ADAPTER)
    if adapter is None or parameter is not module.weight:
        return parameter
    assert isinstance(adapter, Adapter)
    return adapter.merged(parameter)


def _of_module(module: torch.nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each direct parameter of a module, and for a router's expert biases.

    The expert biases are a buffer in Megatron.
    """
    yield from module.named_parameters(path, recurse=False)
    bias = module._buffers.get("expert_bias")
    if bias is not None:
        yield f"{path}.expert_bias", bias


def parameters_of(models: Sequence[torch.nn.Module]) -> Iterator[tuple[Place, torch.nn.Module, Tensor]]:
    """Yield (place, module, parameter) for each parameter of this rank.

    The order is the same on all tensor ranks.
    """
    whole: Any
    for whole in models:
        layers, seen = whole.decoder.layers, set()
        for path, module in whole.named_modules():
            for name, parameter in _of_module(module, path):
                if parameter in seen or ADAPTER in path.split("."):
                    continue
                seen.add(parameter)
                if not name.startswith(IN_DECODER):
                    yield Place(name), module, parameter
                    continue
                number, _, within = name.removeprefix(IN_DECODER).partition(".")
                layer = layers[int(number)]
                expert = EXPERT.search(within)
                if expert is None:
                    yield Place(within, layer.layer_number - 1), module, parameter
                    continue
                general = f"{within[: expert.start()]}.*.{within[expert.end() :]}"
                yield (
                    Place(general, layer.layer_number - 1, layer.mlp.local_expert_indices[int(expert[1])]),
                    module,
                    parameter,
                )


Put = Callable[[Tensor, Tensor], None]  # writes a new value to a parameter


class StreamedLoad:
    """Loads one set of weights that arrives in parts.

    A parameter is written as soon as all its tensors have arrived.
    """

    def __init__(self, weights: ModelWeights, models: Sequence[torch.nn.Module], put: Put) -> None:
        self._weights, self._put = weights, put
        self._held: dict[str, Tensor] = {}  # received tensors of parameters that are not complete yet
        self._waiting = [(place, parameter, weights.names_at(place)) for place, _, parameter in parameters_of(models)]

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors, and write every parameter whose tensors have all arrived.

        `tensors`: name -> full tensor. The caller may reuse their memory after the call.
        """
        available = self._held | dict(tensors)
        waiting = []
        for place, parameter, names in self._waiting:
            if all(name in available for name in names):
                part = self._weights.part_at(place, TensorSource(available))
                if part.shape != parameter.shape:
                    raise ValueError(
                        f"{' and '.join(names)}: received shape {list(part.shape)}, expected {list(parameter.shape)}"
                    )
                self._put(parameter, part)
            else:
                waiting.append((place, parameter, names))
        self._waiting = waiting
        needed = {name for _, _, names in waiting for name in names}
        self._held = {
            name: tensor.clone() if name in tensors else tensor for name, tensor in available.items() if name in needed
        }

    def finish(self) -> None:
        """Raise ValueError if a tensor of a parameter has not arrived."""
        if self._waiting:
            _, _, names = self._waiting[0]
            raise ValueError(f"{len(self._waiting)} parameters lack weights, first {' and '.join(names)}")
