"""Parameters out of a Megatron model: whole tensors, one after the other, on rank 0."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from roll_opd.megatron.weights.tensor_slices import Sizes, TensorSlice


@dataclass(frozen=True)
class Shard:
    """What a rank has of a parameter: how it is cut, and the shape and dtype of the part.

    `names` are Hugging Face's, of an expert's parameter those of each expert rank's one, else a single entry.
    """

    names: tuple[tuple[str, ...], ...]
    cut: TensorSlice
    shape: torch.Size
    dtype: torch.dtype
    is_of_experts: bool = False


Mine = Sequence[tuple[Shard, Callable[[], Tensor]]]  # a rank's parameters
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # of whole tensors, by name


def streamed(mine: Mine, sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of all ranks' shards, by its name, on rank 0, and nothing on the others. Collective.

    Stage after stage, parameter after parameter, so that rank 0 has room for little more than a tensor, or that of each
    expert rank. The ranks of a stage have parameters of the same shapes in the same order.
    """
    for shard, parts in _gathered(mine):
        if parts is not None:
            yield from _joined(shard, parts, sizes)


def streamed_everywhere(mine: Mine, sizes: Sizes, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield what `streamed` does, in its order, on every rank. Collective; `shapes` are those of what is yielded."""
    for shard, parts in _gathered(mine):
        whole = dict(_joined(shard, parts, sizes)) if parts is not None else {}
        for name in (name for names in shard.names for name in names):
            if whole:
                tensor = whole.pop(name).contiguous()
            else:
                dtype, shape = shapes[name]
                tensor = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
            dist.broadcast(tensor, 0)
            yield name, tensor


def _gathered(mine: Mine) -> Iterator[tuple[Shard, list[Tensor] | None]]:
    """Yield each parameter's shard on every rank, with the parts of all ranks on rank 0 and None on the others."""
    stage, group = parallel_state.get_pipeline_model_parallel_rank(), _pipeline_group()
    listed: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(listed, [shard for shard, _ in mine], group=group)
    seen: set[str] = set()
    for owner, shards in enumerate(listed):
        for number, shard in enumerate(shards):
            if shard.names[0][0] in seen:  # tied embeddings are on two stages
                continue
            seen.add(shard.names[0][0])
            parts = _of_all_ranks(mine[number][1], shard) if owner == stage else None
            if _is_first_of_stage() and owner:
                parts = _to_first_stage(parts, owner, shard)
            yield shard, parts if _is_first_of_stage() and stage == 0 else None


def _joined(shard: Shard, parts: list[Tensor], sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
    each = len(parts) // len(shard.names)
    for expert_rank, names in enumerate(shard.names):
        of_one = parts[expert_rank * each : (expert_rank + 1) * each]
        yield from zip(names, shard.cut.join(of_one, sizes), strict=True)


def tensor_rank(*, of_experts: bool = False) -> tuple[int, int]:
    """Return this rank's number among those that share a matrix, or one of an expert, and how many there are."""
    if of_experts:
        group = parallel_state.get_expert_tensor_parallel_group()
        return dist.get_rank(group), dist.get_world_size(group)
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def of_all_expert_ranks(expert: int, config: TransformerConfig) -> list[int]:
    """Return the numbers of the experts that stand where `expert` does on this rank, on each expert rank."""
    assert config.num_moe_experts
    ranks = config.expert_model_parallel_size
    each = config.num_moe_experts // ranks
    return [expert % each + rank * each for rank in range(ranks)]


def _pipeline_group() -> Any:
    return parallel_state.get_pipeline_model_parallel_group()


def _is_first_of_stage() -> bool:
    return tensor_rank()[0] == 0 and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _of_all_ranks(part: Callable[[], Tensor], shard: Shard) -> list[Tensor] | None:
    """Return the parts of all ranks that share a parameter, or have other experts', on the first rank of their stage.

    None on the others, and on those that have copies. Collective over all ranks of a stage.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if shard.is_of_experts:
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


def _to_first_stage(parts: list[Tensor] | None, owner: int, shard: Shard) -> list[Tensor] | None:
    """Send the parts of a parameter from the stage that owns it to the first one; None on all but this."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if stage == owner:
        assert parts is not None
        dist.send(torch.stack(parts), group=_pipeline_group(), group_dst=0)
    elif stage == 0:
        group = parallel_state.get_tensor_model_parallel_group()
        if shard.is_of_experts:
            group = parallel_state.get_expert_tensor_and_model_parallel_group()
        ranks = dist.get_world_size(group)
        received = torch.empty(ranks, *shard.shape, dtype=shard.dtype, device=torch.cuda.current_device())
        dist.recv(received, group=_pipeline_group(), group_src=owner)
        return list(received)
    return None
