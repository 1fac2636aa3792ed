"""Gather the parameters of a Megatron model into full Hugging Face tensors, layer by layer.

A plan is made once, with one exchange of objects between all ranks. It describes every full tensor: name, dtype, shape
and group. A group has the tensors of one layer, or those before or after all layers, as in vLLM's weight transfer. A
sync only exchanges values: each rank packs its shards of a chunk (one kind and dtype of a group) into one tensor and
sends it to the receivers, which join the shards of all senders. Tensors of the same shape and kind, such as one matrix
of each expert, are packed, joined and passed on as one stack: a mixture has more tensors than a loop over them has time
for.

Legend: R senders of a chunk, N values of a chunk on one rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from roll_opd.megatron.parallel import tensor_rank
from roll_opd.megatron.weights.tensor_slices import RowSplit, SliceSizes, TensorSlice

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
class Owner:
    """The ranks that have a tensor: a pipeline stage, or of an expert's tensor, one expert rank of a stage."""

    stage: int
    expert_rank: int | None


@dataclass(frozen=True)
class Seat:
    """A rank's place among the ranks of an owner, which are numbered replica by replica."""

    number: int
    ranks: int  # over which a tensor is split
    replicas: int


@dataclass(frozen=True)
class FullTensor:
    """Description of a full Hugging Face tensor, and of where its values are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owner: "Owner"
    split: RowSplit  # over the tensor ranks of the owner


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
    # of each run, for each expert rank, for each tensor of a parameter: its names
    names: Sequence[Sequence[Sequence[Sequence[str]]]]

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
# names of tensors with the same shape, and these tensors, stacked; None: another rank of the stage gets them
Stack = tuple[Sequence[str], Tensor | None]


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
        return {name for owner in self.owners() if self.seat(owner) for name in self.names_of(owner)}

    def owners(self) -> list[Owner]:
        """Return the owners of all tensors. Every rank has the same list."""
        return list(dict.fromkeys(tensor.owner for group in self.groups for tensor in group))

    def seat(self, owner: Owner) -> Seat | None:
        """Return this rank's place among the ranks of an owner; None if it is not one of them."""
        is_expert = owner.expert_rank is not None
        if owner.stage != self._stage:
            return None
        if is_expert and owner.expert_rank != parallel_state.get_expert_model_parallel_rank():
            return None
        rank, ranks = tensor_rank(expert=is_expert)
        if is_expert:
            replicas = parallel_state.get_expert_data_parallel_world_size()
        else:
            replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return Seat(_place(is_expert=is_expert)[0] * ranks + rank, ranks, replicas)

    def names_of(self, owner: Owner) -> list[str]:
        """Return the names of the tensors of an owner of this rank, in the order of `shares`."""
        return [name for _, _, names in self._held(owner) for name in names]

    @torch.no_grad()
    def shares(self, owner: Owner, whole: Set[str] = frozenset()) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, this rank's part) for each tensor of an owner of this rank.

        A part has the rows of `FullTensor.split`, and may share memory with its parameter. The tensors named in `whole`
        are gathered within the owner, which is collective, and yielded as full tensors.
        """
        for number, shard, names in self._held(owner):
            value, (rank, ranks) = self._values[number](), tensor_rank(expert=shard.is_expert)
            tensors = shard.slicing.shares(value, rank, ranks, self._sizes)
            if shard.slicing.dim is not None and not whole.isdisjoint(names):
                parts = [torch.empty_like(value) for _ in range(ranks)]
                dist.all_gather(parts, value.contiguous(), group=_tensor_group(is_expert=shard.is_expert))
                gathered = shard.slicing.join(parts, self._sizes)
                tensors = [full if n in whole else part for n, full, part in zip(names, gathered, tensors, strict=True)]
            yield from zip(names, tensors, strict=True)

    def _held(self, owner: Owner) -> Iterator[tuple[int, ParameterShard, tuple[str, ...]]]:
        """Yield (index, shard, names of its tensors) for each parameter of an owner of this rank."""
        for chunk in chain.from_iterable(self._groups):
            if (chunk.kind.stage, chunk.kind.is_expert) == (owner.stage, owner.expert_rank is not None):
                for number, shard in zip(chunk.numbers, chunk.shards, strict=True):
                    yield number, shard, shard.names[owner.expert_rank or 0]

    def stacks(self, receivers: Receivers) -> Iterator[Stack]:
        """Yield (names, full tensors) in the order of `groups`. Collective: every rank must iterate to the end.

        Ranks that are no receivers yield nothing. Two chunks are in memory: the next one arrives while the caller
        reads one. A stack may share memory with its parameter or with other stacks.
        """
        return (stack for _, stacks in self._chunks(receivers) for stack in stacks)

    def tensors(self, receivers: Receivers) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, full tensor), as `stacks` does."""
        return chain.from_iterable(map(unstacked, self.stacks(receivers)))

    def batches(self, receivers: Receivers) -> Iterator[list[Stack]]:
        """Yield the stacks of each group, as `stacks` does. One group and two chunks are in memory."""
        for _, chunks in groupby(self._chunks(receivers), itemgetter(0)):
            if found := [stack for _, stacks in chunks for stack in stacks]:
                yield found

    def _full(self, chunk: ShardChunk) -> Iterator[FullTensor]:
        """Yield the full tensors of a chunk. Their shapes are found by joining parts without values."""
        ranks = tensor_rank(expert=chunk.kind.is_expert)[1]
        for run, of_ranks in zip(chunk.runs, chunk.names, strict=True):
            parts = [torch.empty(run[0].shape, device="meta")] * ranks
            shapes = [tuple(tensor.shape) for tensor in run[0].slicing.join(parts, self._sizes)]
            splits = run[0].slicing.splits(run[0].shape, ranks, self._sizes)
            for expert_rank, stacks in enumerate(of_ranks):
                owner = Owner(chunk.kind.stage, expert_rank if chunk.kind.is_expert else None)
                for names, shape, split in zip(stacks, shapes, splits, strict=True):
                    yield from (FullTensor(name, chunk.kind.dtype, shape, owner, split) for name in names)

    def _chunks(self, receivers: Receivers) -> Iterator[tuple[int, list[Stack]]]:
        """Yield (index of the group, stacks of a chunk of it). Other ranks than receivers get no stacks."""
        chunks = ((number, chunk) for number, group in enumerate(self._groups) for chunk in group)
        present = None
        for number, chunk in chunks:
            following = number, self._start(chunk, receivers)
            if present:
                yield present[0], self._finish(present[1], receivers)
            present = following
        if present:
            yield present[0], self._finish(present[1], receivers)

    @torch.no_grad()
    def _start(self, chunk: ShardChunk, receivers: Receivers) -> Arrival:
        """Start to send and to receive a chunk."""
        group: Any = dist.group.WORLD
        rank, senders = dist.get_rank(), self._senders[chunk.kind.stage, chunk.kind.is_expert]
        if receivers is Receivers.STAGE:
            if chunk.kind.stage != self._stage:
                return Arrival(chunk)
            group = _tensor_group(is_expert=chunk.kind.is_expert)
            senders = dist.get_process_group_ranks(group)
        values = [self._values[number]() for number in chunk.numbers] if rank in senders else []
        only_first = receivers is Receivers.FIRST
        if senders == [rank] and (group.size() == 1 or (only_first and rank == 0)):
            return Arrival(chunk, values)
        if only_first and rank and not values:
            return Arrival(chunk)
        ranks, length = 1 if only_first and rank else len(senders), sum(shard.shape.numel() for shard in chunk.shards)
        packed_RN = torch.empty(ranks, length, dtype=chunk.kind.dtype, device=torch.cuda.current_device())
        if values:
            own = 0 if ranks == 1 else senders.index(rank)
            _pack(chunk, values, packed_RN[own])
        if not only_first:
            works = [dist.broadcast(packed_RN[n], sender, group, async_op=True) for n, sender in enumerate(senders)]
        elif rank:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, packed_RN[0], 0)])
        else:
            others = [(n, sender) for n, sender in enumerate(senders) if sender]
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, packed_RN[n], sender) for n, sender in others])
        return Arrival(chunk, (), packed_RN, works)

    @torch.no_grad()
    def _finish(self, arrival: Arrival, receivers: Receivers) -> list[Stack]:
        """Return the full tensors of a chunk; an empty list on ranks that do not receive them."""
        chunk, packed_RN = arrival.chunk, arrival.packed_RN
        for work in arrival.works:
            work.wait()
        parts: Iterable[Sequence[Tensor]]  # of each run, for each rank with parts of it, its parts, stacked
        if packed_RN is None or (receivers is Receivers.FIRST and dist.get_rank()):
            parts = [[_stacked(values)] for values in _by_run(chunk, arrival.values)] if arrival.values else []
        else:
            parts = [
                piece_RN.view(-1, len(run), *run[0].shape).unbind()
                for run, piece_RN in zip(chunk.runs, packed_RN.split(_lengths(chunk), 1), strict=True)
            ]
        ranks, first = tensor_rank(expert=chunk.kind.is_expert)[1], _first_expert_rank(chunk.kind, receivers)
        found: list[Stack] = []
        for run, of_ranks, of_run in zip(chunk.runs, chunk.names, parts, strict=False):
            joined = {
                first + start // ranks: run[0].slicing.join(of_run[start : start + ranks], self._sizes, lead=1)
                for start in range(0, len(of_run), ranks)
            }
            for expert_rank, names in enumerate(of_ranks):
                found += zip(names, joined.get(expert_rank, [None] * len(names)), strict=True)
        return found


def unstacked(stack: Stack) -> Iterator[tuple[str, Tensor | None]]:
    """Return (name, tensor) of each tensor of a stack."""
    names, tensors = stack
    return zip(names, [None] * len(names) if tensors is None else tensors.unbind(), strict=True)


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
    names = [
        [list(zip(*(shard.names[rank] for shard in run), strict=True)) for rank in range(len(run[0].names))]
        for run in runs
    ]
    return ShardChunk(kind, [number for number, _ in members], runs, names)


def _join_of(shard: ParameterShard) -> tuple[TensorSlice, torch.Size]:
    return shard.slicing, shard.shape


def _lengths(chunk: ShardChunk) -> list[int]:
    """Return the number of values of each run on one rank."""
    return [len(run) * run[0].shape.numel() for run in chunk.runs]


def _by_run(chunk: ShardChunk, values: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield the values of each run of a chunk."""
    left = iter(values)
    return (list(islice(left, len(run))) for run in chunk.runs)


def _pack(chunk: ShardChunk, values: Sequence[Tensor], packed_N: Tensor) -> None:
    """Copy this rank's shards of a chunk into `packed_N`."""
    for run, of_run, piece in zip(chunk.runs, _by_run(chunk, values), packed_N.split(_lengths(chunk)), strict=True):
        torch.stack(list(of_run), out=piece.view(len(run), *run[0].shape))


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Return the values stacked, in their own memory if there is only one."""
    return values[0].detach()[None] if len(values) == 1 else torch.stack(list(values))


def _place(*, is_expert: bool) -> tuple[int, int]:
    """Return this rank's replica of its stage, and the number of its part of the parameters."""
    if is_expert:
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        return parallel_state.get_expert_data_parallel_rank(), group.rank()
    return parallel_state.get_data_parallel_rank(with_context_parallel=True), tensor_rank()[0]


def _tensor_group(*, is_expert: bool) -> dist.ProcessGroup:
    """Return the ranks over which a parameter is split."""
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _first_expert_rank(kind: ShardKind, receivers: Receivers) -> int:
    """Return the first of the expert ranks whose parts are gathered."""
    in_stage = kind.is_expert and receivers is Receivers.STAGE
    return parallel_state.get_expert_model_parallel_rank() if in_stage else 0
