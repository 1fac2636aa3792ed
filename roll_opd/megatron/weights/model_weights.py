"""Weights into and out of a Megatron model, under Hugging Face's names: no rank reads or holds more than it needs."""

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

from roll_opd.megatron.lora import ADAPTER, Adapter, LinearLayer, last_part
from roll_opd.megatron.weights.families import ENDS, FAMILIES, Entry
from roll_opd.megatron.weights.source import Files, Given
from roll_opd.megatron.weights.stream import (
    Shapes,
    Shard,
    of_all_expert_ranks,
    streamed,
    streamed_everywhere,
    tensor_rank,
)
from roll_opd.megatron.weights.tensor_slices import Sizes, Source
from roll_opd.models.weight_files import BUFFERS, EMBEDDING, HEAD, IN_A_LAYER, may_be_zero

ROWS_LOOKED_AT = 64  # of a matrix, spread over it
IN_DECODER = "decoder.layers."
EXPERT = re.compile(r"(?<=local_experts)\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """A parameter: its name within a layer, or in the model, and numbers from 0 over all ranks.

    In the names of experts' parameters, a star stands for the number.
    """

    name: str
    layer: int | None = None
    expert: int | None = None


class ModelWeights:
    """The weights of one model, however it is spread over ranks; `config` is Megatron's."""

    def __init__(self, hf_config: PretrainedConfig, config: TransformerConfig, padded_vocab: int) -> None:
        self.config, self.padded_vocab = config, padded_vocab
        self._family = FAMILIES[hf_config.model_type]
        self._predicting_layers = getattr(hf_config, "num_nextn_predict_layers", 0) or 0
        self._tied = bool(hf_config.tie_word_embeddings)
        self.sizes = Sizes(
            hf_config.num_attention_heads, hf_config.num_key_value_heads, hf_config.vocab_size, padded_vocab
        )

    def load(self, models: Sequence[torch.nn.Module], source: Files | Given) -> None:
        """Fill the parameters of this rank's model chunks; each rank reads its own parts.

        Raises:
            ValueError: for a tensor that is missing, has no place here, does not fit, or holds zeros alone or in half
                of its rows.
        """
        self._check_names(source)
        read_from = LookedAt(source) if isinstance(source, Files) else source
        for place, _, parameter in parameters_of(models):
            names = self.names_at(place)
            part = self.part_at(place, read_from)
            if part.shape != parameter.shape:
                raise ValueError(
                    f"{source}: {' and '.join(names)} give {list(part.shape)} on this rank, config.json makes it"
                    f" {list(parameter.shape)}; put the config.json of the same release beside them"
                )
            with torch.no_grad():
                parameter.copy_(part)

    def names_at(self, place: Place) -> Sequence[str]:
        """Return Hugging Face's names of what a parameter is made of."""
        return self._entry(place).of(place.layer, place.expert)

    def part_at(self, place: Place, source: Source) -> Tensor:
        """Return what this rank's parameter is to hold."""
        entry = self._entry(place)
        rank, ranks = tensor_rank(of_experts=entry.is_of_experts)
        return entry.cut.read(source, self.names_at(place), rank, ranks, self.sizes)

    def whole_tensors(
        self, models: Sequence[torch.nn.Module], everywhere: Shapes | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor, by its name, on rank 0, and nothing on the others. Collective: iterate to the end.

        Given the shapes of all, yield them on every rank. Adapters are added to what they stand beside. What is yielded
        may be the parameter's own memory.
        """
        shards = []
        for place, module, parameter in parameters_of(models):
            entry = self._entry(place)
            experts = [None] if place.expert is None else of_all_expert_ranks(place.expert, self.config)
            names = tuple(entry.of(place.layer, expert) for expert in experts)
            shard = Shard(names, entry.cut, parameter.shape, parameter.dtype, entry.is_of_experts)
            shards.append((shard, partial(with_adapter, module, parameter)))
        return streamed_everywhere(shards, self.sizes, everywhere) if everywhere else streamed(shards, self.sizes)

    def linear_layers(
        self, models: Sequence[torch.nn.Module], targets: Collection[str], source: Files
    ) -> list[LinearLayer]:
        """Return this rank's linear layers that hold one of Hugging Face's modules which are called as in `targets`."""
        found = []
        for place, module, parameter in parameters_of(models):
            entry = self._entry(place)
            tensors = entry.of(place.layer, place.expert)
            names = tuple(name.removesuffix(".weight") for name in tensors)
            if parameter.dim() == 2 and any(last_part(name) in targets for name in names):
                found.append(LinearLayer(module, names, tuple(map(source.shape, tensors)), entry.cut))
        return found

    def _entry(self, place: Place) -> Entry:
        if self._tied and place.name == "output_layer.weight":
            return ENDS["embedding.word_embeddings.weight"]
        known = ENDS if place.layer is None else self._family.layer
        if place.name not in known:
            raise ValueError(f"Megatron's parameter {place.name} has no entry in megatron/weights/families.py")
        return known[place.name]

    def _check_names(self, source: Files | Given) -> None:
        """Raise ValueError for a tensor of a layer that would be left out without a word."""
        known: set[str] = set()
        for entry in self._family.layer.values():
            experts = range(self.config.num_moe_experts or 0) if entry.is_of_experts else [None]
            for layer, expert in product(range(self.config.num_layers), experts):
                known.update(entry.of(layer, expert))
        in_layers = [name for name in source.names if self._is_in_a_layer(name) and not name.endswith(BUFFERS)]
        if unknown := [name for name in in_layers if name not in known]:
            raise ValueError(f"{source}: {', '.join(unknown[:3])} have no place in this model; get its own config.json")

    def _is_in_a_layer(self, name: str) -> bool:
        """Whether a tensor is of a layer, and not of those behind the last, which predict further tokens."""
        match = IN_A_LAYER.match(name)
        behind = range(self.config.num_layers, self.config.num_layers + self._predicting_layers)
        return match is not None and int(match[1]) not in behind


@dataclass(frozen=True)
class LookedAt:
    """A source that raises ValueError for a tensor that is zero, wholly or in half of its rows."""

    source: Files | Given

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        piece = self.source.part(name, dim, start, stop)
        if is_lost(name, piece) and is_lost(name, self.source.part(name, 0, 0, self.shape(name)[0])):
            raise ValueError(f"{self.source}: {name} holds zeros alone, or in half of its rows; get the model again")
        return piece


def is_lost(name: str, tensor: Tensor) -> bool:
    """Say whether a tensor is zero, wholly or in half of its rows: a model without it gives no error.

    Biases may be zero, and so may rows of the vocabulary.
    """
    if may_be_zero(name) or not tensor.numel():
        return False
    if name in (EMBEDDING, HEAD):
        return not tensor.any()
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[None]
    looked_at = rows[:: -(-len(rows) // ROWS_LOOKED_AT)].any(1)
    return 2 * int(looked_at.sum()) <= len(looked_at)


def with_adapter(module: torch.nn.Module, parameter: Tensor) -> Tensor:
    """Return a parameter of `module`, with what the adapter beside it adds to it."""
    adapter = module._modules.get(ADAPTER)
    if adapter is None or parameter is not module.weight:
        return parameter
    assert isinstance(adapter, Adapter)
    return adapter.added_to(parameter)


def _of_module(module: torch.nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters, and the biases of routers, which no gradient moves."""
    yield from module.named_parameters(path, recurse=False)
    bias = module._buffers.get("expert_bias")
    if bias is not None:
        yield f"{path}.expert_bias", bias


def parameters_of(models: Sequence[torch.nn.Module]) -> Iterator[tuple[Place, torch.nn.Module, Tensor]]:
    """Yield this rank's parameters, each with the module that has it, in an order that all tensor ranks share."""
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


Put = Callable[[Tensor, Tensor], None]  # a parameter, and what it is to take


class Arriving:
    """One set of weights on its way into this rank's model chunks."""

    def __init__(self, weights: ModelWeights, models: Sequence[torch.nn.Module], put: Put) -> None:
        self._weights, self._put = weights, put
        self._held: dict[str, Tensor] = {}  # of parameters that still wait for others
        self._waiting = [(place, parameter, weights.names_at(place)) for place, _, parameter in parameters_of(models)]

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill what can be filled now with whole `tensors`, by Hugging Face's names. They are not needed afterwards."""
        there = self._held | dict(tensors)
        waiting = []
        for place, parameter, names in self._waiting:
            if all(name in there for name in names):
                part = self._weights.part_at(place, Given(there))
                if part.shape != parameter.shape:
                    raise ValueError(f"{' and '.join(names)}: {list(part.shape)} came for {list(parameter.shape)}")
                self._put(parameter, part)
            else:
                waiting.append((place, parameter, names))
        self._waiting = waiting
        still = {name for _, _, names in waiting for name in names}
        self._held = {
            name: tensor.clone() if name in tensors else tensor for name, tensor in there.items() if name in still
        }

    def end(self) -> None:
        """Raise ValueError where something has not come."""
        if self._waiting:
            _, _, names = self._waiting[0]
            raise ValueError(f"weights did not arrive: {' and '.join(names)}, and {len(self._waiting) - 1} more")
