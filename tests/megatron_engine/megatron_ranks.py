"""Functions for the operations of all files in a rank: make trainers, write results, save, join process groups."""

import json
import os
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import MicroBatchLimits, ModelPlan, OptimizerPlan, TrainPlan
from roll_opd.megatron import learner_engine as learner_module
from roll_opd.megatron import training_state
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.export import hf_tensors
from roll_opd.megatron.learner_engine import MegatronLearner
from roll_opd.megatron.student_engine import MegatronTrainer
from roll_opd.models.memory import shard_of, train_memory
from roll_opd.models.model_info import read_model
from roll_opd.samples.micro_batches import TrainResult

# jobs whose gradients are reduced, and parameters gathered, while something else is computed, in small buckets
OVERLAPPED = (
    "few-dp2",
    "replay-qwen2_moe-ep2",
    "replay-qwen2_moe-cp2ep2",
    "replay-qwen2_moe-pp2ep2",
    "train-qwen3_tied-tp2dp2-distributed-70",
    "train-deep-pp2vpp2-distributed-70",
    "lora-dp2",
)
BUCKET = 3000  # values
Job = dict[str, Any]
WRITER = ThreadPoolExecutor(1)
SAVES: list[Future[list[Path]]] = []
STORES: list[dist.Store] = []  # where this process's groups meet, while it is rank 0 of them


def write_arrays(path: Path, mine: dict[int, np.ndarray] | None) -> None:
    """Gather and write the arrays of the ranks that have results; two ranks must not have the same sequence."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    merged: dict[str, np.ndarray] = {}
    for share in shares:
        for number, values in (share or {}).items():
            if str(number) in merged:
                raise RuntimeError(f"sequence {number} was scored twice")
            merged[str(number)] = values
    if dist.get_rank() == 0:
        np.savez(path, **merged)


def optimizer_of(job: Job, distributed: bool) -> OptimizerPlan:
    """Return the optimizer of `cases`, with the overlaps of the job."""
    plan = data.optimizer_plan(distributed, changed=job.get("changed", False))
    overlaps = job.get("as", job["name"]) in OVERLAPPED
    learner_module.DistributedDataParallelConfig = partial(  # Megatron's own buckets hold 40 M values
        DistributedDataParallelConfig, bucket_size=BUCKET if overlaps else None
    )
    return replace(plan, overlap_grad_reduce=overlaps, overlap_param_gather=overlaps)


def trainer_of(job: Job, root: Path, optimizer: OptimizerPlan, limits: MicroBatchLimits) -> MegatronTrainer:
    layout = layouts.LAYOUTS[job["layout"]]
    path = layouts.model_path(root, job["model"])
    devices = tuple(range(layout.world_size))
    model = ModelPlan(path, job.get("dtype", "fp32"))
    args = FrozenDict(job.get("megatron_args", {}))
    plan = TrainPlan(
        "train", model, devices, layout, MicroBatchLimits(), args, train_limits=limits, optimizer=optimizer
    )
    return MegatronTrainer(plan, seed=0)


STILL = OptimizerPlan(learning_rate=0.0, max_grad_norm=1e9, use_distributed_optimizer=False)  # weights stay as they are


def gradient(learner: MegatronLearner) -> np.ndarray:
    """Return the gradient of all weights in Hugging Face's order, concatenated; it is exported like the weights."""
    parameters = [parameter for chunk in learner.chunks for parameter in chunk.parameters()]
    values = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    pieces = {name: tensor.flatten().clone() for name, tensor in hf_tensors(learner)}
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)
    return torch.cat([torch.zeros(0), *(pieces[name] for name in sorted(pieces))]).numpy()  # on rank 0


def record(result: TrainResult) -> dict[str, Any]:
    """Return the results of all ranks for one update: sums over the ranks, and values that must be equal on all
    ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (result.sums, result.grad_norm, result.applied))
    names = {name for sums, _, _ in everyone for name in sums}
    return {
        **{name: sum(sums.get(name, 0.0) for sums, _, _ in everyone) for name in names},
        "grad_norms": [norm for _, norm, _ in everyone],
        "applied": [applied for _, _, applied in everyone],
        "learning_rate": result.learning_rate,
    }


def held(learner: MegatronLearner, job: Job, root: Path) -> None:
    """Write the bytes of this rank after an update, part by part, and the bytes in the plan."""
    models = [parameter for chunk in learner.chunks for parameter in chunk.parameters()]
    buffers = [buffer for chunk in learner.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    optimizers = [one.optimizer for one in getattr(learner.optimizer, "chained_optimizers", [learner.optimizer])]
    moments = [value for one in optimizers for state in one.state.values() for value in state.values()]
    masters = [shard for one in optimizers for group in one.param_groups for shard in group["params"]]
    states = [value for value in moments if isinstance(value, torch.Tensor) and value.ndim]
    states += masters if learner.plan.model.dtype != "fp32" else []
    parts = {"weights": models, "gradients": [buffer.grad_data for buffer in buffers], "optimizer": states}
    shard = shard_of(read_model(Path(learner.plan.model.path)), learner.plan)
    planned = train_memory(shard, learner.plan, 64, parallel_state.get_pipeline_model_parallel_rank())
    sizes = {name: (sum(t.numel() * t.element_size() for t in ts), planned[name]) for name, ts in parts.items()}
    (root / f"{job['name']}-held-{dist.get_rank()}.json").write_text(json.dumps(sizes))


def save(learner: MegatronLearner, directory: Path) -> None:
    """Start to write the state while the job continues; see `saved`."""
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    SAVES.append(WRITER.submit(training_state.save_state(learner, directory, later=True)))


def saved() -> None:
    """Wait until the state is saved; each rank returns the files of all ranks."""
    while SAVES:
        files = SAVES.pop().result()
        assert files and all(file.is_file() for file in files), files


def write_json(path: Path, value: Any) -> None:
    if dist.get_rank() == 0:
        path.write_text(json.dumps(value))


def weights(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """This rank's own."""
    own = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
    return {str(number): parameter.detach().clone() for number, parameter in enumerate(own)}


def identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def write_results(path: Path, results: dict[str, np.ndarray]) -> None:
    if dist.get_rank() == 0:
        np.savez(path, **results)


def meet_anew(file: Path) -> None:
    """Make a new store for the next process group: gloo would read the addresses in an old store as its peers'.

    Rank 0 listens from the moment when its port is known, so that no other process can take the port.
    """
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", MASTER_ADDR="127.0.0.1")
    if os.environ["RANK"] == "0":
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        descriptor = listening.detach()
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, is_master=True, master_listen_fd=descriptor)
        STORES.append(store)
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(str(port))
        unfinished.rename(file)
    while not file.exists():
        time.sleep(0.002)
    os.environ["MASTER_PORT"] = file.read_text()
