"""Gather the parameters of a Megatron model into full tensors, one by one, on rank 0 or on all ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from roll_opd.megatron.weights.tensor_slices import SliceSizes, TensorSlice


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


RankParameters = Sequence[tuple[ParameterShard, Callable[[], Tensor]]]
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of full tensors, by name


def gather_to_rank_0(parameters: RankParameters, sizes: SliceSizes) -> Iterator[tuple[str, Tensor]]:
    """Gather the shards of all ranks, and yield (name, full tensor) on rank 0. Collective.

    Other ranks yield nothing.

    Parameters are gathered one by one, in the order of pipeline stages. So rank 0 holds about one tensor at a time, or
    one tensor per expert rank. All ranks of a stage must list parameters of the same shapes in the same order.
    """
    for shard, parts in _gathered(parameters):
        if parts is not None:
            yield from _join(shard, parts, sizes)


def gather_to_all_ranks(parameters: RankParameters, sizes: SliceSizes, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) on every rank, in the order of `gather_to_rank_0`. Collective.

    `shapes`: dtype and shape of every tensor.
    """
    for shard, parts in _gathered(parameters):
        whole = dict(_join(shard, parts, sizes)) if parts is not None else {}
        for name in (name for names in shard.names for name in names):
            if whole:
                tensor = whole.pop(name).contiguous()
            else:
                dtype, shape = shapes[name]
                tensor = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
            dist.broadcast(tensor, 0)
            yield name, tensor


def _gathered(parameters: RankParameters) -> Iterator[tuple[ParameterShard, list[Tensor] | None]]:
    """Yield (shard, parts) for each parameter.

    On rank 0, `parts` are the parts of all ranks. On other ranks it is None.
    """
    stage, group = parallel_state.get_pipeline_model_parallel_rank(), _pipeline_group()
    listed: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(listed, [shard for shard, _ in parameters], group=group)
    seen: set[str] = set()
    for owner, shards in enumerate(listed):
        for number, shard in enumerate(shards):
            if shard.names[0][0] in seen:  # tied embeddings are on two stages
                continue
            seen.add(shard.names[0][0])
            parts = _gather_parts(parameters[number][1], shard) if owner == stage else None
            if _is_first_in_stage() and owner:
                parts = _to_first_stage(parts, owner, shard)
            yield shard, parts if _is_first_in_stage() and stage == 0 else None


def _join(shard: ParameterShard, parts: list[Tensor], sizes: SliceSizes) -> Iterator[tuple[str, Tensor]]:
    each = len(parts) // len(shard.names)
    for expert_rank, names in enumerate(shard.names):
        one = parts[expert_rank * each : (expert_rank + 1) * each]
        yield from zip(names, shard.slicing.join(one, sizes), strict=True)


def tensor_rank(*, expert: bool = False) -> tuple[int, int]:
    """Return (rank, size) in the tensor-parallel group.

    With `expert`, the expert-tensor-parallel group is used instead.
    """
    if expert:
        group = parallel_state.get_expert_tensor_parallel_group()
        return dist.get_rank(group), dist.get_world_size(group)
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def peers_of_expert(expert: int, config: TransformerConfig) -> list[int]:
    """Return, for each expert rank, the expert that has the same local index as `expert`."""
    assert config.num_moe_experts
    ranks = config.expert_model_parallel_size
    each = config.num_moe_experts // ranks
    return [expert % each + rank * each for rank in range(ranks)]


def _pipeline_group() -> Any:
    return parallel_state.get_pipeline_model_parallel_group()


def _is_first_in_stage() -> bool:
    return tensor_rank()[0] == 0 and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _gather_parts(part: Callable[[], Tensor], shard: ParameterShard) -> list[Tensor] | None:
    """Gather the parts of a parameter on the first rank of its stage. Collective over all ranks of the stage.

    The parts come from all tensor ranks, and for an expert also from all expert ranks. Data-parallel replicas do not
    take part. Other ranks than the first return None.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if shard.is_expert:
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        copy = parallel_state.get_expert_data_parallel_rank()
    ranks = dist.get_world_size(group)
    if copy:
        return None
    own = part().detach()
    if ranks == 1:
        return [own]
    parts = [torch.empty_like(own) for _ in range(ranks)] if dist.get_rank(group) == 0 else None
    dist.gather(own.contiguous(), parts, group=group, group_dst=0)
    return parts


def _to_first_stage(parts: list[Tensor] | None, owner: int, shard: ParameterShard) -> list[Tensor] | None:
    """Send the parts of a parameter to the first stage.

    Returns the parts on the first stage, and None on other stages. `owner`: the stage that has the parts.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if stage == owner:
        assert parts is not None
        dist.send(torch.stack(parts), group=_pipeline_group(), group_dst=0)
    elif stage == 0:
        group = parallel_state.get_tensor_model_parallel_group()
        if shard.is_expert:
            group = parallel_state.get_expert_tensor_and_model_parallel_group()
        ranks = dist.get_world_size(group)
        received = torch.empty(ranks, *shard.shape, dtype=shard.dtype, device=torch.cuda.current_device())
        dist.recv(received, group=_pipeline_group(), group_src=owner)
        return list(received)
    return None
