"""Parameters out of a Megatron model: whole tensors, one after the other, on rank 0."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from roll_opd.megatron.weights.cuts import Cut, Sizes


@dataclass(frozen=True)
class Shard:
    """What a rank has of a parameter: its Hugging Face names, how it is cut, and the shape and dtype of the part."""

    names: tuple[str, ...]
    cut: Cut
    shape: torch.Size
    dtype: torch.dtype


def streamed(mine: Sequence[tuple[Shard, Callable[[], Tensor]]], sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of all ranks' shards, by its name, on rank 0, and nothing on the others. Collective.

    Stage after stage, parameter after parameter, so that rank 0 has room for little more than a tensor. Tensor ranks
    have the same parameters in the same order.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True):
        return  # these ranks have what the first have
    stage, group = parallel_state.get_pipeline_model_parallel_rank(), _pipeline_group()
    listed: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(listed, [shard for shard, _ in mine], group=group)
    seen: set[str] = set()
    for owner, shards in enumerate(listed):
        for number, shard in enumerate(shards):
            if shard.names[0] in seen:  # tied embeddings are on two stages
                continue
            seen.add(shard.names[0])
            parts = _of_tensor_ranks(mine[number][1]().detach()) if owner == stage else None
            if tensor_rank()[0]:
                continue
            if owner:
                parts = _to_first_stage(parts, owner, shard.shape, shard.dtype)
            if stage == 0:
                assert parts is not None
                yield from zip(shard.names, shard.cut.join(parts, sizes), strict=True)


def tensor_rank() -> tuple[int, int]:
    """Return this rank's number among the tensor ranks, and how many there are."""
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _pipeline_group() -> Any:
    return parallel_state.get_pipeline_model_parallel_group()


def _of_tensor_ranks(shard: Tensor) -> list[Tensor] | None:
    """Return the shards of all tensor ranks on the first of them, None on the others. Collective over these."""
    rank, ranks = tensor_rank()
    if ranks == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(ranks)] if rank == 0 else None
    dist.gather(shard.contiguous(), shards, group=parallel_state.get_tensor_model_parallel_group(), group_dst=0)
    return shards


def _to_first_stage(
    shards: list[Tensor] | None, owner: int, shape: torch.Size, dtype: torch.dtype
) -> list[Tensor] | None:
    """Send the shards of a parameter from the stage that owns it to the first one; None on all but this."""
    stage, ranks = parallel_state.get_pipeline_model_parallel_rank(), tensor_rank()[1]
    if stage == owner:
        assert shards is not None
        dist.send(torch.stack(shards), group=_pipeline_group(), group_dst=0)
    elif stage == 0:
        received = torch.empty(ranks, *shape, dtype=dtype, device=torch.cuda.current_device())
        dist.recv(received, group=_pipeline_group(), group_src=owner)
        return list(received)
    return None
