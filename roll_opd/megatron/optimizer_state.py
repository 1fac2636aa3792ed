"""The state of Megatron's distributed optimizer as pieces of whole tensors: each rank saves and loads its own alone.

Megatron's own form that every layout can load (`fully_reshardable`) gathers the state of all data-parallel ranks on
each of them, in f32. A rank has a stretch of the numbers of each parameter, which in rows and columns is a part of a
row, whole rows, and a part of a row.
"""

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Parameter

_PREFIX = "optimizer.state"  # of the names in a checkpoint, as Megatron writes them


def optimizer_pieces(optimizer: DistributedOptimizer, model: Any) -> dict[str, ShardedTensor]:
    """Return this rank's f32 weights and moments, views that are saved and loaded in place.

    `model` is what Megatron says of the parameters (`sharded_state_dict`).
    """
    described = {entry.data: entry for entry in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    found: dict[str, ShardedTensor] = {}
    for parameter, start, end in _stretches(optimizer):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        for shard in _shards(described[parameter]):
            assert shard.data is not None
            first = (shard.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
            low, high = max(start, first), min(end, first + shard.data.numel())
            for name, values in tensors.items():
                if values.ndim and low < high:  # numbers of steps are saved with the parameter groups
                    own = values.detach()[low - start : high - start]
                    for piece in _rectangles(own, low - first, shard, f"{_PREFIX}.{name}.{shard.key}"):
                        found[f"{piece.key} {piece.global_offset}"] = piece
    return found


def _stretches(optimizer: DistributedOptimizer) -> Iterator[tuple[Parameter, int, int]]:
    """Yield the parameters of whose state this rank has some, and at which of its numbers that begins and ends."""
    for of_buffer in optimizer.gbuf_ranges:
        for buckets in of_buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _shards(described: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return what lies in a parameter, as views of it: one tensor, or the two of a gated MLP."""
    return [described] if isinstance(described, ShardedTensor) else list(nested_values(described.build()))


def _rectangles(numbers: Tensor, begin: int, shard: ShardedTensor, key: str) -> Iterator[ShardedTensor]:
    """Yield `numbers`, a stretch of those of a shard from number `begin` on, as rectangles of the tensor `key`."""
    dimensions = len(shard.local_shape)
    if dimensions > 2:
        raise ValueError(f"{shard.key}: a tensor of {dimensions} dimensions cannot be saved in pieces")
    assert isinstance(shard.replica_id, tuple)
    width, end = shard.local_shape[-1], begin + len(numbers)
    *of_rows, of_columns = shard.global_offset
    for stop in (min(-(-begin // width) * width, end), max(end // width * width, begin), end):
        if stop == begin:
            continue
        row, column = divmod(begin, width)
        if dimensions == 2:
            place = (*of_rows[:-1], of_rows[-1] + row, of_columns + column)
            shape = (*(1 for _ in of_rows[:-1]), max((stop - begin) // width, 1), -1)
        else:
            place, shape = (*of_rows, of_columns + column), (*(1 for _ in of_rows), -1)
        piece = numbers[: stop - begin].view(shape)
        yield ShardedTensor(
            key=key,
            data=piece,
            dtype=piece.dtype,
            local_shape=tuple(piece.shape),
            global_shape=shard.global_shape,
            global_offset=place,
            axis_fragmentations=None,  # no regular grid
            # of several ranks with copies the first one saves; the last number is that of the data-parallel rank
            replica_id=(*shard.replica_id[:-1], 0),
            allow_shape_mismatch=shard.allow_shape_mismatch,
        )
        begin, numbers = stop, numbers[stop - begin :]
