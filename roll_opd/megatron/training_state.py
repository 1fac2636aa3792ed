"""Save and load the sharded training state: weights, optimizer, schedule and random state.

A state can be loaded under another layout than the one that saved it. The caller creates the directory. After every
rank has finished, the caller renames the directory atomically to a checkpoint.

The state of Megatron's distributed optimizer is saved as pieces of full tensors. Megatron's layout-independent format
(`fully_reshardable`) is not used, because it would gather the f32 state of all data-parallel ranks on every rank. A
rank owns a contiguous range of each parameter's elements. Such a range consists of up to three rectangular pieces: the
end of a row, full rows, and the start of a row.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Parameter

from roll_opd.megatron import parallel
from roll_opd.megatron.export import Written
from roll_opd.megatron.learner_engine import MegatronLearner, optimizers_of
from roll_opd.megatron.lora import sharded_state
from roll_opd.megatron.model_builder import unwrapped
from roll_opd.models.device_phases import Part


class _Strategy(TorchDistSaveShardedStrategy):
    """Save strategy for Megatron's `torch_dist` format. `write` may be called in any thread of this process.

    Megatron's own strategy forks writer processes, which has two disadvantages. Forking a process with threads (of Ray,
    gloo or OpenMP) can hang. If a run is killed, its writer processes continue to run.
    """

    write: Callable[[], Any]

    def __init__(self, *, later: bool) -> None:
        super().__init__("torch_dist", 1)
        self._later = later

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        for tensor in (one for shards in renamed.values() for one in shards if isinstance(one, ShardedTensor)):
            assert tensor.data is not None
            tensor.data = tensor.data.detach().to("cpu", copy=self._later)
        self.write = partial(
            dcp.save,
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=parallel.writer_group() if self._later else None,
        )


def save_state(learner: MegatronLearner, directory: Path, *, later: bool = False) -> Written:
    """Save this rank's shards to the empty `directory`. Collective.

    Returns a callable that returns the files of all ranks. With `later`, the state is only copied to the host, and the
    callable writes it. The callable is collective and may run in any thread. If one rank cannot write, every rank
    raises an error.
    """
    learner.memory.check("save its state", Part.WEIGHTS, Part.OPTIMIZER)
    learner.wait_for_weights()
    for optimizer in _optimizers(learner):
        if not optimizer.optimizer.state:  # before the first update; Megatron needs a state
            _allocate_optimizer_state(optimizer)
    strategy = _Strategy(later=later)
    dist_checkpointing.save(_state(learner, is_loading=False), str(directory), strategy)

    def write() -> list[Path]:
        stored = strategy.write().storage_data or {}
        return sorted({directory / place.relative_path for place in stored.values()})

    return write if later else partial(list, write())


def load_state(learner: MegatronLearner, directory: Path) -> None:
    """Load weights, moments, step counts and random state saved by `save_state`. Collective.

    Learning rates, betas, epsilon and weight decay come from the learner's plan, not from the checkpoint. If one rank
    cannot read its part, every rank raises an error.
    """
    learner.memory.check("load a state", Part.WEIGHTS, Part.OPTIMIZER)
    for optimizer in _optimizers(learner):
        _allocate_optimizer_state(optimizer)
    try:
        state: Any = dist_checkpointing.load(_state(learner, is_loading=True), str(directory))
    except CheckpointException as error:  # contains the tracebacks of all ranks
        raise next(failure for failure, _ in error.failures.values()) from None
    for index, chunk in enumerate(learner.chunks):
        unwrapped(chunk).load_state_dict(state[_chunk_key(index)], strict=learner.adapters is None)
    settings = _settings(learner.optimizer)
    learner.optimizer.load_state_dict(_for_optimizers(state["optimizer"], len(_optimizers(learner))))
    for group, own in zip(learner.optimizer.param_groups, settings, strict=True):
        group |= own
    for each in _optimizers(learner):
        # after loading, all parameters share one step tensor: AdamW would advance it once per parameter
        fused = each.optimizer.param_groups[0].get(
            "fused"
        )  # fused AdamW counts steps on the device, other variants on the host
        for parameter, state_of_parameter in each.optimizer.state.items():
            if "step" in state_of_parameter:
                step = state_of_parameter["step"].clone()
                state_of_parameter["step"] = step.to(parameter.device) if fused else step
    # restore only the number of updates; rates and weight decay follow from it and the plan
    learner.scheduler.num_steps = 0
    learner.scheduler.step(state["scheduler"]["num_steps"])
    _restore_random_state(state["random"])


def _optimizers(learner: MegatronLearner) -> list[MegatronOptimizer]:
    return optimizers_of(learner.optimizer)


def _settings(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, without the parameters and the step count."""
    return [{k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups]


def _chain(learner: MegatronLearner) -> ChainedOptimizer:
    assert isinstance(learner.optimizer, ChainedOptimizer)
    return learner.optimizer


def _state(learner: MegatronLearner, *, is_loading: bool) -> dict[str, Any]:
    models = {
        _chunk_key(number): sharded_state(model) if learner.adapters else model.sharded_state_dict(metadata={})
        for number, model in enumerate(unwrapped(chunk) for chunk in learner.chunks)
    }
    chain = _chain(learner)
    if len(chain.chained_optimizers) > 1:  # experts have a separate optimizer
        chain._synchronize_steps()
    optimizers: dict[Any, Any] = {}
    pieces: dict[str, ShardedTensor] = {}
    for number, each in enumerate(chain.chained_optimizers):
        if isinstance(each, DistributedOptimizer):
            optimizers[number] = each.state_dict()
            pieces |= optimizer_pieces(each, models)
        else:
            optimizers[number] = each.sharded_state_dict(models, is_loading, metadata={})
    common = {"scheduler": learner.scheduler.state_dict(), "random": _random_state()}
    return {**models, "optimizer": optimizers if len(optimizers) > 1 else optimizers[0], "pieces": pieces, **common}


def _for_optimizers(state: dict[Any, Any], optimizers: int) -> dict[Any, Any]:
    """Convert the loaded state to the state of this layout's optimizers.

    `optimizers` is the number of optimizers. State that is not a tensor (steps and learning rates) is copied to all of
    them.
    """
    numbers = [key for key in state if isinstance(key, int)]
    if optimizers == 1 and numbers:
        return {**state[0], **{key: value for key, value in state.items() if key not in numbers}}
    if optimizers > 1:
        common = {key: value for key, value in state.items() if key not in numbers}
        return {number: {**common, **state[number]} for number in range(optimizers)}
    return state


def _allocate_optimizer_state(optimizer: Any) -> None:
    """Allocate Adam's moments as zeros, because loading writes into existing tensors."""
    inner = optimizer.optimizer
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = 0.0  # the step below then changes no weight, not even by decay
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    inner.step()
    inner.zero_grad()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
        if "step" in group:  # step count of Transformer Engine's Adam; torch's AdamW has it with the moments
            group["step"] = 0
    for moments in inner.state.values():
        if "step" in moments:
            moments["step"].zero_()


def _chunk_key(index: int) -> str:
    return f"model{index}"


def _random_state() -> dict[str, Any]:
    # rank 0's state for all: without dropout training draws no random numbers, and sampling is seeded per request
    state = [{"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}]
    dist.broadcast_object_list(state, src=0)
    return state[0]


def _restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


_PREFIX = "optimizer.state"  # prefix of names in a checkpoint, as in Megatron


def optimizer_pieces(optimizer: DistributedOptimizer, model: Any) -> dict[str, ShardedTensor]:
    """Return this rank's f32 weights and moments as sharded tensors.

    The tensors are views, so that loading writes in place. `model` is Megatron's `sharded_state_dict` of the
    parameters.
    """
    described = {entry.data: entry for entry in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    found: dict[str, ShardedTensor] = {}
    for parameter, start, end in _owned_ranges(optimizer):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        for shard in _shards(described[parameter]):
            assert shard.data is not None
            first = (shard.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
            low, high = max(start, first), min(end, first + shard.data.numel())
            for name, values in tensors.items():
                if values.ndim and low < high:  # step counts are saved with the parameter groups
                    own = values.detach()[low - start : high - start]
                    for piece in _rectangles(own, low - first, shard, f"{_PREFIX}.{name}.{shard.key}"):
                        found[f"{piece.key} {piece.global_offset}"] = piece
    return found


def _owned_ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[Parameter, int, int]]:
    """Yield (parameter, start, end) for each range of elements whose optimizer state is on this rank."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _shards(described: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the tensors that a parameter contains, as views.

    Most parameters contain one tensor. The parameter of an MLP's first layer contains two tensors, gate and up.
    """
    return [described] if isinstance(described, ShardedTensor) else list(nested_values(described.build()))


def _rectangles(values: Tensor, begin: int, shard: ShardedTensor, key: str) -> Iterator[ShardedTensor]:
    """Yield rectangular pieces of a range of elements of a shard.

    - `values`: the elements of the range.
    - `begin`: index of the first of these elements in the shard.
    - `key`: name of the full tensor in the checkpoint.
    """
    dimensions = len(shard.local_shape)
    if dimensions > 2:
        raise ValueError(f"{shard.key}: optimizer state of {dimensions} dimensions is not supported; expected 1 or 2")
    assert isinstance(shard.replica_id, tuple)
    width, end = shard.local_shape[-1], begin + len(values)
    *rows, columns = shard.global_offset
    for stop in (min(-(-begin // width) * width, end), max(end // width * width, begin), end):
        if stop == begin:
            continue
        row, column = divmod(begin, width)
        if dimensions == 2:
            place = (*rows[:-1], rows[-1] + row, columns + column)
            shape = (*(1 for _ in rows[:-1]), max((stop - begin) // width, 1), -1)
        else:
            place, shape = (*rows, columns + column), (*(1 for _ in rows), -1)
        piece = values[: stop - begin].view(shape)
        yield ShardedTensor(
            key=key,
            data=piece,
            dtype=piece.dtype,
            local_shape=tuple(piece.shape),
            global_shape=shard.global_shape,
            global_offset=place,
            axis_fragmentations=None,  # not a regular grid
            # replica 0 saves; the last element, the data-parallel rank, is 0, because no other rank has this piece
            replica_id=(*shard.replica_id[:-1], 0),
            allow_shape_mismatch=shard.allow_shape_mismatch,
        )
        begin, values = stop, values[stop - begin :]
