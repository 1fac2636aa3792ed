"""Gather the parameters of a Megatron model into full Hugging Face tensors, layer by layer.

A plan is made once, with one exchange of objects between all ranks. It describes every full tensor: name, dtype, shape
and group. A group has the tensors of one layer, or those before or after all layers, as in vLLM's weight transfer. A
sync only exchanges values: each rank packs its shards of a chunk (one kind and dtype of a group) into one tensor and
sends it to the receivers, which join the shards of all senders.

Legend: R senders of a chunk, N values of a chunk on one rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from roll_opd.megatron.parallel import tensor_rank
from roll_opd.megatron.weights.tensor_slices import SliceSizes, TensorSlice

CHUNK_BYTES = 256 * 2**20  # most bytes of a gathered chunk, unless a single parameter has more
BEFORE_LAYERS, AFTER_LAYERS = -1, 2**31  # positions of the groups outside of the layers


class Receivers(Enum):
    """The ranks that get the full tensors."""

    FIRST = "rank 0"
    ALL = "all ranks"
    STAGE = "all ranks of the tensor's pipeline stage; of an expert, the ranks that hold it"


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
class ShardKind:
    """What shards have in common that are gathered together."""

    stage: int
    is_expert: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class ShardChunk:
    """Shards of one group and kind that are gathered together."""

    kind: ShardKind
    numbers: Sequence[int]  # of each shard, its index in the stage's list of parameters
    runs: Sequence[Sequence[ParameterShard]]  # the shards; those of a run have the same slicing and shape

    @property
    def shards(self) -> Iterator[ParameterShard]:
        return chain.from_iterable(self.runs)


@dataclass(frozen=True)
class Arrival:
    """A chunk on its way."""

    chunk: ShardChunk
    values: Sequence[Tensor] = ()  # shards of a chunk that stays on this rank
    packed_RN: Tensor | None = None  # shards of all senders; on a sender that does not receive, only its own
    works: Sequence[Any] = ()  # collectives that read or write `packed_RN`


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
        places = [_place(is_expert=is_expert) for is_expert in (False, True)]
        is_first = places[0] == (0, 0)  # in its stage
        listed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(listed, (self._stage, places, [shard for shard, _ in parameters] if is_first else None))
        described = {stage: shards for stage, _, shards in listed if shards is not None}
        # ranks whose shards make up the parameters of a stage; other replicas have the same
        self._senders: dict[tuple[int, bool], list[int]] = {}
        for is_expert in (False, True):
            for (replica, _), rank in sorted((found[1][is_expert], rank) for rank, found in enumerate(listed)):
                if replica == 0:
                    self._senders.setdefault((listed[rank][0], is_expert), []).append(rank)
        ranks = [len(self._senders[0, is_expert]) for is_expert in (False, True)]
        self._groups = grouped([described[stage] for stage in sorted(described)], *ranks)
        self.groups = [[tensor for chunk in group for tensor in self._full(chunk)] for group in self._groups]

    def held_names(self) -> set[str]:
        """Return the names of the tensors that this rank gets with `Receivers.STAGE`."""
        return {
            name
            for group in self._groups
            for chunk in group
            if chunk.kind.stage == self._stage
            for shard in chunk.shards
            for name in shard.names[_first_expert_rank(chunk.kind, Receivers.STAGE)]
        }

    def tensors(self, receivers: Receivers) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, full tensor) in the order of `groups`. Collective: every rank must iterate to the end.

        Ranks that are no receivers yield nothing. Two chunks are in memory: the next one arrives while the caller
        reads one. A tensor may share memory with its parameter or with other tensors.
        """
        return (pair for _, named in self._chunks(receivers) for pair in named)

    def batches(self, receivers: Receivers) -> Iterator[Named]:
        """Yield the tensors of each group, as `tensors` does. One group and two chunks are in memory."""
        for _, chunks in groupby(self._chunks(receivers), itemgetter(0)):
            if found := [pair for _, named in chunks for pair in named]:
                yield found

    def _full(self, chunk: ShardChunk) -> Iterator[FullTensor]:
        """Yield the full tensors of a chunk. Their shapes are found by joining parts without values."""
        ranks = tensor_rank(expert=chunk.kind.is_expert)[1]
        for run in chunk.runs:
            parts = [torch.empty(run[0].shape, device="meta")] * ranks
            shapes = [tuple(tensor.shape) for tensor in run[0].slicing.join(parts, self._sizes)]
            for names in (names for shard in run for names in shard.names):
                for name, shape in zip(names, shapes, strict=True):
                    yield FullTensor(name, chunk.kind.dtype, shape)

    def _chunks(self, receivers: Receivers) -> Iterator[tuple[int, Named]]:
        """Yield (index of the group, tensors of a chunk of it). Other ranks than receivers get no tensors."""
        chunks = ((number, chunk) for number, group in enumerate(self._groups) for chunk in group)
        present = None
        for number, chunk in chunks:
            following = number, self._start(chunk, receivers)
            if present:
                yield present[0], self._finish(present[1], receivers)
            present = following
        if present:
            yield present[0], self._finish(present[1], receivers)

    def _start(self, chunk: ShardChunk, receivers: Receivers) -> Arrival:
        """Start to send and to receive a chunk."""
        group: Any = dist.group.WORLD
        rank, senders = dist.get_rank(), self._senders[chunk.kind.stage, chunk.kind.is_expert]
        if receivers is Receivers.STAGE:
            if chunk.kind.stage != self._stage:
                return Arrival(chunk)
            group = _tensor_group(chunk.kind)
            senders = dist.get_process_group_ranks(group)
        values = [self._values[number]().detach() for number in chunk.numbers] if rank in senders else []
        only_first = receivers is Receivers.FIRST
        if senders == [rank] and (group.size() == 1 or (only_first and rank == 0)):
            return Arrival(chunk, values)
        if only_first and rank and not values:
            return Arrival(chunk)
        ranks, length = 1 if only_first and rank else len(senders), sum(shard.shape.numel() for shard in chunk.shards)
        packed_RN = torch.empty(ranks, length, dtype=chunk.kind.dtype, device=torch.cuda.current_device())
        if values:
            own = 0 if ranks == 1 else senders.index(rank)
            torch.cat([value.flatten() for value in values], out=packed_RN[own])
        if not only_first:
            works = [dist.broadcast(packed_RN[n], sender, group, async_op=True) for n, sender in enumerate(senders)]
        elif rank:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, packed_RN[0], 0)])
        else:
            others = [(n, sender) for n, sender in enumerate(senders) if sender]
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, packed_RN[n], sender) for n, sender in others])
        return Arrival(chunk, (), packed_RN, works)

    def _finish(self, arrival: Arrival, receivers: Receivers) -> Named:
        """Return the full tensors of a chunk; an empty list on ranks that do not receive them."""
        chunk, packed_RN = arrival.chunk, arrival.packed_RN
        for work in arrival.works:
            work.wait()
        if packed_RN is None or (receivers is Receivers.FIRST and dist.get_rank()):
            runs = [([shard], [value[None]]) for shard, value in zip(chunk.shards, arrival.values, strict=False)]
            return self._joined(runs, chunk.kind, receivers)
        pieces = packed_RN.split([len(run) * run[0].shape.numel() for run in chunk.runs], 1)
        parts = [
            piece.view(-1, len(run), *run[0].shape).unbind() for run, piece in zip(chunk.runs, pieces, strict=True)
        ]
        return self._joined(zip(chunk.runs, parts, strict=True), chunk.kind, receivers)

    def _joined(
        self, runs: Iterable[tuple[Sequence[ParameterShard], Sequence[Tensor]]], kind: ShardKind, receivers: Receivers
    ) -> Named:
        """Return the full tensors of runs of shards.

        `runs`: shards, and for each rank with parts of them, its parts, stacked.
        """
        ranks, first = tensor_rank(expert=kind.is_expert)[1], _first_expert_rank(kind, receivers)
        found: Named = []
        for run, parts in runs:
            tensors = [
                _join(run[0].slicing, parts[start : start + ranks], self._sizes)
                for start in range(0, len(parts), ranks)
            ]
            for number, shard in enumerate(run):
                for expert_rank, names in enumerate(shard.names):
                    here = 0 <= expert_rank - first < len(tensors)
                    one = tensors[expert_rank - first][number] if here else [None] * len(names)
                    found += zip(names, one, strict=True)
        return found


def grouped(stages: Sequence[Sequence[ParameterShard]], ranks: int, expert_ranks: int) -> list[list[ShardChunk]]:
    """Return the groups of all stages' shards, each divided into chunks.

    Args:
        stages: shards of each pipeline stage, in the order of its parameters.
        ranks: number of ranks over which a parameter is split.
        expert_ranks: number of ranks over which the experts are split.
    """
    groups: dict[int, dict[ShardKind, list[tuple[int, ParameterShard]]]] = {}
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
            kind = ShardKind(stage, shard.is_expert, shard.dtype)
            groups.setdefault(layer, {}).setdefault(kind, []).append((number, shard))
    return [
        [
            chunk
            for kind, members in groups[layer].items()
            for chunk in _divided(kind, members, expert_ranks if kind.is_expert else ranks)
        ]
        for layer in sorted(groups)
    ]


def _divided(kind: ShardKind, members: Sequence[tuple[int, ParameterShard]], ranks: int) -> Iterator[ShardChunk]:
    """Divide the shards of a group into chunks of at most `CHUNK_BYTES`. `members`: index and shard of a parameter."""
    alike: dict[Any, list[tuple[int, ParameterShard]]] = {}
    for member in members:
        alike.setdefault(_join_of(member[1]), []).append(member)
    held: list[tuple[int, ParameterShard]] = []
    size = 0
    for number, shard in chain.from_iterable(alike.values()):
        more = ranks * shard.shape.numel() * kind.dtype.itemsize
        if held and size + more > CHUNK_BYTES:
            yield _chunk(kind, held)
            held, size = [], 0
        held.append((number, shard))
        size += more
    yield _chunk(kind, held)


def _chunk(kind: ShardKind, members: Sequence[tuple[int, ParameterShard]]) -> ShardChunk:
    runs = [list(run) for _, run in groupby((shard for _, shard in members), _join_of)]
    return ShardChunk(kind, [number for number, _ in members], runs)


def _join_of(shard: ParameterShard) -> tuple[TensorSlice, torch.Size]:
    return shard.slicing, shard.shape


def _join(slicing: TensorSlice, parts: Sequence[Tensor], sizes: SliceSizes) -> list[Sequence[Tensor]]:
    """Return the full tensors of each shard of a run. `parts`: for each rank, the stacked parts."""
    if len(parts[0]) == 1:
        return [slicing.join([part[0] for part in parts], sizes)]
    joined = torch.vmap(lambda *shards: tuple(slicing.join(shards, sizes)))(*parts)
    return list(zip(*(tensors.unbind() for tensors in joined), strict=True))


def _place(*, is_expert: bool) -> tuple[int, int]:
    """Return this rank's replica of its stage, and the number of its part of the parameters."""
    if is_expert:
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        return parallel_state.get_expert_data_parallel_rank(), group.rank()
    return parallel_state.get_data_parallel_rank(with_context_parallel=True), tensor_rank()[0]


def _tensor_group(kind: ShardKind) -> dist.ProcessGroup:
    """Return the ranks over which a parameter of a kind is split."""
    if kind.is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _first_expert_rank(kind: ShardKind, receivers: Receivers) -> int:
    """Return the first of the expert ranks whose parts are gathered."""
    in_stage = kind.is_expert and receivers is Receivers.STAGE
    return parallel_state.get_expert_model_parallel_rank() if in_stage else 0
