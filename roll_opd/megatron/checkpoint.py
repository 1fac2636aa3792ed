"""Sharded training state: weights, optimizer, schedule and random state of every rank, loadable under another layout.

These functions write into and read from a directory that the caller has made; whether it counts as a checkpoint is
decided elsewhere, by one atomic rename after every rank has finished.
"""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer

from roll_opd.megatron.learner import MegatronLearner
from roll_opd.megatron.lora import sharded_state
from roll_opd.megatron.model import PackedModel, unwrapped

# Optimizer state in the shape of the parameters, so that any TP x PP x DP can load it.
# Passed as a copy: Megatron stores the process groups of the current layout in it.
# With expert parallelism there is an optimizer for experts beside the other; both name states by their parameters.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class _InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's `torch_dist` format written by this process.

    The stock strategy forks writer processes; forking a process that holds threads (Ray's, gloo's, OpenMP's) can
    hang, and a killed run would leave the writers behind.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp.save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save_state(learner: MegatronLearner, directory: Path) -> None:
    """Write this rank's shards into `directory`, which exists and is empty. Collective.

    Raises on every rank when one of them cannot write.
    """
    learner.settle()
    for optimizer in _optimizers(learner):
        if not optimizer.optimizer.state:  # no update has been applied yet, and Megatron wants to save a state
            _allocate_optimizer_state(optimizer)
    strategy = _InProcessSave("torch_dist", 1)
    dist_checkpointing.save(_state(learner, is_loading=False), str(directory), strategy)


def load_state(learner: MegatronLearner, directory: Path) -> None:
    """Restore what `save_state` wrote. Collective."""
    for optimizer in _optimizers(learner):
        _allocate_optimizer_state(optimizer)
        if isinstance(optimizer, DistributedOptimizer):
            _patch_step_loading(optimizer)
    state: Any = dist_checkpointing.load(_state(learner, is_loading=True), str(directory))
    for index, chunk in enumerate(learner.chunks):
        unwrapped(chunk).load_state_dict(state[_chunk_key(index)], strict=learner.adapters is None)
    learner.optimizer.load_state_dict(_for_as_many(state["optimizer"], len(_optimizers(learner))))
    learner.scheduler.load_state_dict(state["scheduler"])
    _restore_random_state(state["random"])


def _optimizers(learner: MegatronLearner) -> list[MegatronOptimizer]:
    assert isinstance(learner.optimizer, ChainedOptimizer)
    return learner.optimizer.chained_optimizers


def _state(learner: MegatronLearner, is_loading: bool) -> dict[str, Any]:
    model = {_chunk_key(index): _weights(learner, unwrapped(chunk)) for index, chunk in enumerate(learner.chunks)}
    for each in _optimizers(learner):
        if isinstance(each, DistributedOptimizer):
            each.get_parameter_state_dp_zero = partial(_with_padding, each)  # type: ignore[method-assign]
    optimizer = learner.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(_METADATA))
    common = {"scheduler": learner.scheduler.state_dict(), "random": _random_state()}
    return {**model, "optimizer": optimizer, **common}


def _for_as_many(state: dict[Any, Any], optimizers: int) -> dict[Any, Any]:
    """Return the state for so many optimizers: what tensors do not say (steps, rates) is the same of all of them."""
    numbers = [key for key in state if isinstance(key, int)]
    if optimizers == 1 and numbers:
        return {**state[0], **{key: value for key, value in state.items() if key not in numbers}}
    if optimizers > 1:
        common = {key: value for key, value in state.items() if key not in numbers}
        return {number: {**common, **state[number]} for number in range(optimizers)}
    return state


def _weights(learner: MegatronLearner, model: PackedModel) -> dict[str, Any]:
    """Return what learns of a model chunk: the whole of it, or its adapters alone."""
    return sharded_state(model) if learner.adapters else model.sharded_state_dict(metadata=dict(_METADATA))


def _allocate_optimizer_state(optimizer: Any) -> None:
    """Give Adam its (zero) moments of step 0: loading needs tensors to load into, and a fresh optimizer has none."""
    inner = optimizer.optimizer
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = 0.0  # moves no weight, not even by decay
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    inner.step()
    inner.zero_grad()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
        if "step" in group:  # Transformer Engine's Adam counts here, torch's with the moments
            group["step"] = 0
    for moments in inner.state.values():
        if "step" in moments:
            moments["step"].zero_()


def _patch_step_loading(optimizer: Any) -> None:
    """Work around megatron-core 0.16.1 with torch's AdamW.

    It restores `step` and then asks the checkpoint for it a second time; and it gives all parameters one and the
    same `step` tensor, which AdamW would then advance once a parameter.
    """
    original = optimizer._set_main_param_and_optimizer_states

    def with_step(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[model_param]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        original(model_param, tensors)

    optimizer._set_main_param_and_optimizer_states = with_step


def _with_padding(optimizer: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
    """Return `optimizer.get_parameter_state_dp_zero`, its tensors with the padding between buckets.

    megatron-core 0.16.1 leaves that out, and then cuts parameters where they would be with it: behind the first of
    several buckets, what is saved as a parameter is a part of it and a part of the next.
    """
    state = DistributedOptimizer.get_parameter_state_dp_zero(optimizer, *args, **kwargs)
    for number, buffer in enumerate(optimizer.buffers if state else ()):
        for tensors in state[number].values():
            for name in [name for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)]:
                spread, start = torch.zeros(buffer.numel), 0
                for bucket in buffer.buckets:
                    end = start + bucket.numel_unpadded
                    spread[bucket.offset : bucket.offset + bucket.numel_unpadded] = tensors[name][start:end]
                    start = end
                tensors[name] = spread
    return state


def _chunk_key(index: int) -> str:
    return f"model{index}"


def _random_state() -> dict[str, Any]:
    # Rank 0's: with no dropout nothing in training draws numbers, and sampling is seeded per request
    state = [{"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}]
    dist.broadcast_object_list(state, src=0)
    return state[0]


def _restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
