"""Weights into and out of a Megatron model, under Hugging Face's names: no rank reads or holds more than it needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from roll_opd.hf.weight_files import BUFFERS, EMBEDDING, HEAD, IN_A_LAYER, may_be_zero
from roll_opd.megatron.weights.cuts import Sizes
from roll_opd.megatron.weights.families import ENDS, FAMILIES, Entry
from roll_opd.megatron.weights.source import Files, Given

ROWS_LOOKED_AT = 64  # of a matrix, spread over it
IN_DECODER = "decoder.layers."


@dataclass(frozen=True)
class Place:
    """A parameter: its name within a layer, or in the model, and the layer's number, from 0 over all stages."""

    name: str
    layer: int | None


class ModelWeights:
    """The weights of one model, however it is spread over ranks; `config` is Megatron's."""

    def __init__(self, hf_config: PretrainedConfig, config: TransformerConfig, padded_vocab: int) -> None:
        self.config, self.padded_vocab = config, padded_vocab
        self._family = FAMILIES[hf_config.model_type]
        self._tied = bool(hf_config.tie_word_embeddings)
        self._sizes = Sizes(
            hf_config.num_attention_heads, hf_config.num_key_value_heads, hf_config.vocab_size, padded_vocab
        )

    def load(self, models: Sequence[torch.nn.Module], source: Files | Given) -> None:
        """Fill the parameters of this rank's model chunks; each rank reads its own parts.

        Raises:
            ValueError: for a tensor that is missing, has no place here, does not fit, or holds zeros alone or in half
                of its rows.
        """
        self._check_names(source)
        rank, ranks = _tensor_rank()
        read_from = LookedAt(source) if isinstance(source, Files) else source
        for place, parameter in _parameters(models):
            entry = self._entry(place)
            names = entry.of(place.layer)
            part = entry.cut.read(read_from, names, rank, ranks, self._sizes)
            if part.shape != parameter.shape:
                raise ValueError(
                    f"{source}: {' and '.join(names)} give {list(part.shape)} on this rank, config.json makes it"
                    f" {list(parameter.shape)}; put the config.json of the same release beside them"
                )
            with torch.no_grad():
                parameter.copy_(part)

    def whole_tensors(self, models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor, by its name, on rank 0, and nothing on the others. Collective: iterate to the end.

        Stage after stage, parameter after parameter, so that rank 0 has room for little more than a tensor. What is
        yielded may be the parameter's own memory.
        """
        if parallel_state.get_data_parallel_rank(with_context_parallel=True):
            return  # these ranks have what the first have
        stage, group = parallel_state.get_pipeline_model_parallel_rank(), _pipeline_group()
        mine = list(_parameters(models))
        listed: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(listed, [(place, p.shape, p.dtype) for place, p in mine], group=group)
        seen: set[str] = set()
        for owner, facts in enumerate(listed):
            for number, (place, shape, dtype) in enumerate(facts):
                entry = self._entry(place)
                names = entry.of(place.layer)
                if names[0] in seen:  # tied embeddings are on two stages
                    continue
                seen.add(names[0])
                shards = _of_tensor_ranks(mine[number][1].detach()) if owner == stage else None
                if _tensor_rank()[0]:
                    continue
                if owner:
                    shards = _to_first_stage(shards, owner, shape, dtype)
                if stage == 0:
                    assert shards is not None
                    yield from zip(names, entry.cut.join(shards, self._sizes), strict=True)

    def _entry(self, place: Place) -> Entry:
        if self._tied and place.name == "output_layer.weight":
            return ENDS["embedding.word_embeddings.weight"]
        known = ENDS if place.layer is None else self._family.layer
        if place.name not in known:
            raise ValueError(f"Megatron's parameter {place.name} has no entry in megatron/weights/families.py")
        return known[place.name]

    def _check_names(self, source: Files | Given) -> None:
        """Raise ValueError for a tensor of a layer that would be left out without a word."""
        known = {n for e in self._family.layer.values() for layer in range(self.config.num_layers) for n in e.of(layer)}
        in_layers = [name for name in source.names if IN_A_LAYER.match(name) and not name.endswith(BUFFERS)]
        if unknown := [name for name in in_layers if name not in known]:
            raise ValueError(f"{source}: {', '.join(unknown[:3])} have no place in this model; get its own config.json")


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


def _parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[Place, torch.nn.Parameter]]:
    """Yield this rank's parameters in an order that all tensor ranks share."""
    whole: Any
    for whole in models:
        layers = whole.decoder.layers
        for name, parameter in whole.named_parameters():
            if not name.startswith(IN_DECODER):
                yield Place(name, None), parameter
                continue
            number, _, within = name.removeprefix(IN_DECODER).partition(".")
            yield Place(within, layers[int(number)].layer_number - 1), parameter


def _tensor_rank() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _pipeline_group() -> Any:
    return parallel_state.get_pipeline_model_parallel_group()


def _of_tensor_ranks(shard: Tensor) -> list[Tensor] | None:
    """Return the shards of all tensor ranks on the first of them, None on the others. Collective over these."""
    rank, ranks = _tensor_rank()
    if ranks == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(ranks)] if rank == 0 else None
    dist.gather(shard.contiguous(), shards, group=parallel_state.get_tensor_model_parallel_group(), group_dst=0)
    return shards


def _to_first_stage(
    shards: list[Tensor] | None, owner: int, shape: torch.Size, dtype: torch.dtype
) -> list[Tensor] | None:
    """Send the shards of a parameter from the stage that owns it to the first one; None on all but this."""
    stage, ranks = parallel_state.get_pipeline_model_parallel_rank(), _tensor_rank()[1]
    if stage == owner:
        assert shards is not None
        dist.send(torch.stack(shards), group=_pipeline_group(), group_dst=0)
    elif stage == 0:
        received = torch.empty(ranks, *shape, dtype=dtype, device=torch.cuda.current_device())
        dist.recv(received, group=_pipeline_group(), group_src=owner)
        return list(received)
    return None
