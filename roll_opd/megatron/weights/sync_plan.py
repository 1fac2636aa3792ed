"""Gather the parameters of a Megatron model into full Hugging Face tensors, one collective per layer and kind.

A plan is made once, with one exchange of objects between all ranks. It describes every full tensor: name, dtype, shape
and group. A group has the tensors of one layer, or those before or after all layers, as vLLM's `layerwise_groups` has
them. A sync only exchanges values: each rank packs its shards of a chunk (one kind and dtype of a group) into one
tensor; the packed tensors are gathered on a stage, transferred to where they are needed, and joined there.

Legend: R ranks of a stage that have parts of a chunk's parameters, N values of a chunk on one rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from roll_opd.megatron.parallel import tensor_rank
from roll_opd.megatron.weights.tensor_slices import SliceSizes, TensorSlice

CHUNK_BYTES = 256 * 2**20  # most bytes of a gathered chunk, unless a single parameter has more
BEFORE_LAYERS, AFTER_LAYERS = -1, 2**31  # positions of the groups outside of the layers


class Reach(Enum):
    """The ranks that get the full tensors."""

    FIRST = "rank 0"
    ALL = "all ranks"
    STAGE = "all ranks of the tensor's pipeline stage; for experts, those that hold the expert"


@dataclass(frozen=True)
class ParameterShard:
    """Description of a rank's part of a parameter.

    `names`: tuples of Hugging Face names. An expert's parameter has one tuple per expert rank, other parameters have
    one tuple.
    """

    names: tuple[tuple[str, ...], ...]
    slicing: TensorSlice
    shape: torch.Size
    dtype: torch.dtype
    is_expert: bool = False


@dataclass(frozen=True)
class FullTensor:
    """Description of a full Hugging Face tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """What shards have in common that are gathered together."""

    stage: int
    is_expert: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Chunk:
    """Shards of one group and kind that are gathered together."""

    kind: Kind
    shards: Mapping[int, ParameterShard]  # by their index in the stage's list of parameters


Parameters = Sequence[tuple[ParameterShard, Callable[[], Tensor]]]  # a rank's shards, and functions that return them
Named = list[tuple[str, Tensor | None]]  # tensors by name; None: another rank of the stage gets the tensor


class SyncPlan:
    """The full tensors of a model, and how they are gathered from the parameters of all ranks."""

    def __init__(self, parameters: Parameters, sizes: SliceSizes) -> None:
        """Exchange the descriptions of all shards. Collective.

        All ranks of a stage must list parameters of the same shapes in the same order.
        """
        self._values, self._sizes = [value for _, value in parameters], sizes
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        # the rank that receives the parts of its stage
        self._is_first = (
            tensor_rank()[0] == 0 and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        )
        listed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(listed, [shard for shard, _ in parameters] if self._is_first else None)
        self._first_ranks = [rank for rank, shards in enumerate(listed) if shards is not None]
        experts = parallel_state.get_expert_tensor_and_model_parallel_group().size()
        self._groups = grouped([listed[rank] for rank in self._first_ranks], tensor_rank()[1], experts)
        self.groups = [[tensor for chunk in group for tensor in self._full(chunk)] for group in self._groups]

    def held_names(self) -> set[str]:
        """Return the names of the tensors that this rank gets with `Reach.STAGE`."""
        return {
            name
            for group in self._groups
            for chunk in group
            if chunk.kind.stage == self._stage
            for shard in chunk.shards.values()
            for name in shard.names[_first_expert_rank(chunk.kind, Reach.STAGE)]
        }

    def tensors(self, reach: Reach) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, full tensor) in the order of `groups`. Collective: every rank must iterate to the end.

        Ranks outside of `reach` yield nothing. At most two chunks are in memory. A tensor may share memory with its
        parameter or with other tensors.
        """
        return (pair for group in self._groups for chunk in group for pair in self._gathered(chunk, reach))

    def batches(self, reach: Reach) -> Iterator[Named]:
        """Yield the tensors of each group, as `tensors` does. At most two groups and a chunk are in memory."""
        for group in self._groups:
            if found := [pair for chunk in group for pair in self._gathered(chunk, reach)]:
                yield found

    def _full(self, chunk: Chunk) -> Iterator[FullTensor]:
        """Yield the full tensors of a chunk. Their shapes are found by joining parts without values."""
        shapes: dict[Any, list[torch.Size]] = {}
        ranks = tensor_rank(expert=chunk.kind.is_expert)[1]
        for shard in chunk.shards.values():
            kind = shard.slicing, shard.shape
            if kind not in shapes:
                joined = shard.slicing.join([torch.empty(shard.shape, device="meta")] * ranks, self._sizes)
                shapes[kind] = [tensor.shape for tensor in joined]
            for names in shard.names:
                for name, shape in zip(names, shapes[kind], strict=True):
                    yield FullTensor(name, shard.dtype, tuple(shape))

    def _gathered(self, chunk: Chunk, reach: Reach) -> Named:
        """Return the full tensors of a chunk; an empty list if they do not reach this rank."""
        parts = self._parts(chunk, reach)
        ranks, first = tensor_rank(expert=chunk.kind.is_expert)[1], _first_expert_rank(chunk.kind, reach)
        if not parts:
            return []
        found: Named = []
        for shard, shard_parts in zip(chunk.shards.values(), parts, strict=True):
            for expert_rank, names in enumerate(shard.names):
                start = (expert_rank - first) * ranks
                if 0 <= start < len(shard_parts):
                    found += zip(
                        names, shard.slicing.join(shard_parts[start : start + ranks], self._sizes), strict=True
                    )
                else:
                    found += ((name, None) for name in names)
        return found

    def _parts(self, chunk: Chunk, reach: Reach) -> list[Sequence[Tensor]]:
        """Return the parts of each shard of a chunk; an empty list if they do not reach this rank."""
        in_stage = reach is Reach.STAGE
        group, replica = _group_of(chunk.kind, reach)
        has_parts = chunk.kind.stage == self._stage and (in_stage or replica == 0)  # other replicas have the same
        stays = in_stage or (reach is Reach.FIRST and chunk.kind.stage == 0) or dist.get_world_size() == 1
        values = [self._values[number]().detach() for number in chunk.shards] if has_parts else []
        if stays and group.size() == 1:
            return [[value] for value in values]
        packed_RN = (
            _gather(torch.cat([value.flatten() for value in values]), group, everywhere=in_stage) if values else None
        )
        del values
        if not stays:
            packed_RN = self._transfer(packed_RN, chunk, reach, group.size())
        if packed_RN is None:
            return []
        pieces = packed_RN.split([shard.shape.numel() for shard in chunk.shards.values()], 1)
        return [
            piece.view(-1, *shard.shape).unbind() for piece, shard in zip(pieces, chunk.shards.values(), strict=True)
        ]

    def _transfer(self, packed_RN: Tensor | None, chunk: Chunk, reach: Reach, ranks: int) -> Tensor | None:
        """Send a chunk from the first rank of its stage to rank 0 or to all ranks.

        Returns the chunk on the ranks that receive it, and None on others. `ranks`: R
        """
        receives = packed_RN is None and (reach is Reach.ALL or (self._is_first and self._stage == 0))
        if receives:
            length = sum(shard.shape.numel() for shard in chunk.shards.values())
            packed_RN = torch.empty(ranks, length, dtype=chunk.kind.dtype, device=torch.cuda.current_device())
        if packed_RN is None:
            return None
        if reach is Reach.ALL:
            dist.broadcast(packed_RN, self._first_ranks[chunk.kind.stage])
            return packed_RN
        stages = parallel_state.get_pipeline_model_parallel_group()
        if receives:
            dist.recv(packed_RN, group=stages, group_src=chunk.kind.stage)
            return packed_RN
        dist.send(packed_RN, group=stages, group_dst=0)
        return None


def grouped(stages: Sequence[Sequence[ParameterShard]], ranks: int, expert_ranks: int) -> list[list[Chunk]]:
    """Return the groups of all stages' shards, each divided into chunks.

    Args:
        stages: shards of each pipeline stage, in the order of its parameters.
        ranks: number of ranks over which a parameter is split.
        expert_ranks: number of ranks over which the experts are split.
    """
    groups: dict[int, dict[Kind, dict[int, ParameterShard]]] = {}
    seen: set[str] = set()
    outside = BEFORE_LAYERS
    for stage, shards in enumerate(stages):
        for number, shard in enumerate(shards):
            name = shard.names[0][0]
            if name in seen:  # tied embeddings are on two stages
                continue
            seen.add(name)
            layer = next((int(part) for part in name.split(".") if part.isdigit()), outside)
            if layer != BEFORE_LAYERS:
                outside = AFTER_LAYERS
            kind = Kind(stage, shard.is_expert, shard.dtype)
            groups.setdefault(layer, {}).setdefault(kind, {})[number] = shard
    return [
        [
            chunk
            for kind, shards in groups[layer].items()
            for chunk in _chunks(kind, shards, expert_ranks if kind.is_expert else ranks)
        ]
        for layer in sorted(groups)
    ]


def _chunks(kind: Kind, shards: Mapping[int, ParameterShard], ranks: int) -> Iterator[Chunk]:
    """Divide the shards of one kind of a group into chunks of at most `CHUNK_BYTES`."""
    held: dict[int, ParameterShard] = {}
    size = 0
    for number, shard in shards.items():
        more = ranks * shard.shape.numel() * kind.dtype.itemsize
        if held and size + more > CHUNK_BYTES:
            yield Chunk(kind, held)
            held, size = {}, 0
        held[number] = shard
        size += more
    yield Chunk(kind, held)


def _gather(own_N: Tensor, group: dist.ProcessGroup, *, everywhere: bool) -> Tensor | None:
    """Gather the packed shards of all ranks of a group on its first rank, or on each: [R, N], None elsewhere."""
    if group.size() == 1:
        return own_N[None]
    if not everywhere and group.rank():
        dist.gather(own_N, group=group, group_dst=0)
        return None
    packed_RN = own_N.new_empty(group.size(), len(own_N))
    if everywhere:
        dist.all_gather_into_tensor(packed_RN.view(-1), own_N, group=group)
    else:
        dist.gather(own_N, list(packed_RN), group=group, group_dst=0)
    return packed_RN


def _group_of(kind: Kind, reach: Reach) -> tuple[dist.ProcessGroup, int]:
    """Return the ranks that gather shards of a kind, and the number of this rank's replica of its stage."""
    if not kind.is_expert:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return parallel_state.get_tensor_model_parallel_group(), replica
    if reach is Reach.STAGE:
        return parallel_state.get_expert_tensor_parallel_group(), parallel_state.get_expert_data_parallel_rank()
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    return group, parallel_state.get_expert_data_parallel_rank()


def _first_expert_rank(kind: Kind, reach: Reach) -> int:
    """Return the first of the expert ranks whose parts are gathered."""
    in_stage = kind.is_expert and reach is Reach.STAGE
    return parallel_state.get_expert_model_parallel_rank() if in_stage else 0
