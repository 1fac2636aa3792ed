"""One rank of a launch: does the jobs of `megatron_cases.jobs_of` one after the other and writes what came out.

    torchrun --nproc_per_node N megatron_worker.py LAUNCH ROOT

Importing Megatron's engine patches torch on a CPU, so this never runs inside the test process.
"""

import json
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_cases as cases
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode

from roll_opd.config.plan import MegatronPlan, MicroBatchLimits, ModelPlan, OptimizerPlan, TrainPlan
from roll_opd.megatron import checkpoint, parallel
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.export import hf_tensors, save_hf
from roll_opd.megatron.logprobs import vocab_parallel_logprobs
from roll_opd.megatron.trainer import MegatronTrainer

Job = dict[str, Any]


def frozen(job: Job, root: Path) -> None:
    layout = cases.LAYOUTS[job["layout"]]
    path = cases.model_path(root, job["model"])
    plan = MegatronPlan("frozen", ModelPlan(path), tuple(range(layout.world_size)), layout, MicroBatchLimits())
    engine = MegatronEngine(plan, seed=0)
    sequences = cases.sequences_for(job["model"])
    for name, (rows, tokens, temperature) in cases.PASSES.items():
        engine.plan = replace(plan, forward_limits=MicroBatchLimits(sequences=rows, tokens=tokens))
        write_arrays(root / f"{job['name']}-{name}.npz", engine.logprobs(sequences, temperature))
    write_arrays(root / f"{job['name']}-lonely.npz", engine.logprobs(sequences[:1], 1.0))
    save_hf(engine, root / f"{job['name']}.hf")


def write_arrays(path: Path, mine: dict[int, np.ndarray] | None) -> None:
    """Gather what the ranks that speak computed; two of them may not speak of the same sequence."""
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


def trainer_of(job: Job, root: Path, optimizer: OptimizerPlan, limits: MicroBatchLimits) -> MegatronTrainer:
    layout = cases.LAYOUTS[job["layout"]]
    path = cases.model_path(root, job["model"])
    devices = tuple(range(layout.world_size))
    plan = TrainPlan(
        "train", ModelPlan(path), devices, layout, MicroBatchLimits(), train_limits=limits, optimizer=optimizer
    )
    return MegatronTrainer(plan, seed=0)


def train(job: Job, root: Path) -> None:
    objective = cases.TRAIN_MODELS[job["model"]]
    limits = MicroBatchLimits(tokens=job["tokens"])
    trainer = trainer_of(job, root, cases.optimizer_plan(job["distributed"]), limits)
    if job["load"]:
        checkpoint.load_state(trainer, Path(job["load"]))
    records = []
    for step in range(cases.SAVED_AFTER if job["load"] else 0, cases.UPDATES):
        samples = cases.train_samples(step, objective, job["count"])
        result = trainer.update(samples, cases.OBJECTIVES[objective], cases.TEMPERATURE)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (result.sums, result.grad_norm, result.applied))
        names = {name for sums, _, _ in everyone for name in sums}
        records.append(
            {
                **{name: sum(sums.get(name, 0.0) for sums, _, _ in everyone) for name in names},
                "grad_norms": [norm for _, norm, _ in everyone],
                "applied": [applied for _, _, applied in everyone],
                "learning_rate": result.learning_rate,
            }
        )
        if step == 0:
            write_arrays(root / f"{job['name']}-first.npz", result.logprobs)
        if step + 1 == job["save_after"]:
            directory = root / f"{job['name']}.ckpt"
            if dist.get_rank() == 0:
                directory.mkdir()
            dist.barrier()
            checkpoint.save_state(trainer, directory)
    write_json(root / f"{job['name']}.json", records)
    save_hf(trainer, root / f"{job['name']}.hf")


def supervised(job: Job, root: Path) -> None:
    """One update, in several micro-batches a rank."""
    trainer = trainer_of(job, root, cases.optimizer_plan(True), MicroBatchLimits(tokens=70))
    result = trainer.update(cases.supervised_samples(job["name"]), cases.SUPERVISED[job["name"]], 1.0)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (result.sums.get("weighted_loss", 0.0), result.grad_norm))
    facts = {"loss": sum(loss for loss, _ in everyone), "grad_norms": [norm for _, norm in everyone]}
    write_json(root / f"{job['name']}.json", facts)
    save_hf(trainer, root / f"{job['name']}.hf")


def write_json(path: Path, value: Any) -> None:
    if dist.get_rank() == 0:
        path.write_text(json.dumps(value))


def poison(job: Job, root: Path) -> None:
    """A bad update, then a good one; and in a second trainer the good one alone."""
    job = {**job, "model": "qwen3_tied"}
    objective = cases.OBJECTIVES["opd"]
    optimizer = OptimizerPlan(learning_rate=1e-3)  # constant: the bad update's place in the schedule shows nowhere
    good = cases.train_samples(0, "opd")
    teacher = good[7].opd_teacher.copy()
    teacher[np.flatnonzero(good[7].action_mask)[2]] = float(job["value"])
    bad = [*good[:7], replace(good[7], opd_teacher=teacher), *good[8:]]

    trainer = trainer_of(job, root, optimizer, MicroBatchLimits(tokens=70))
    start = weights(trainer)
    skipped = trainer.update(bad, objective, 1.0)
    after_bad = weights(trainer)
    applied = trainer.update(good, objective, 1.0)
    after_both = weights(trainer)
    parallel.shutdown()

    meet_anew(root / f"port-{job['name']}")
    trainer = trainer_of(job, root, optimizer, MicroBatchLimits(tokens=70))
    trainer.update(good, objective, 1.0)
    facts = {
        "bad_applied": skipped.applied,
        "good_applied": applied.applied,
        "untouched": identical(start, after_bad),
        "moved": not identical(start, after_both),
        "no_trace": identical(after_both, weights(trainer)),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    write_json(root / f"{job['name']}.json", everyone)


def weights(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in hf_tensors(engine)}


def identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def vocab(job: Job, root: Path) -> None:
    """Log-probs and gradients for every chunk size, the padded rows full of large numbers that must not count."""
    parallel.initialize(cases.LAYOUTS[job["layout"]], seed=0)
    group = parallel_state.get_tensor_model_parallel_group()
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    hidden, weight, targets, incoming = cases.vocab_inputs(cases.VOCAB_ROWS, cases.VOCAB_WIDTH, cases.VOCABULARY)
    each = cases.VOCABULARY // ranks + 1
    padded = np.full((each * ranks, cases.VOCAB_WIDTH), 50.0, np.float32)
    padded[: cases.VOCABULARY] = weight
    results = {}
    for name, rows in cases.VOCAB_CHUNK_ROWS.items():
        for temperature in (1.0, 0.7):
            hidden_ME = torch.from_numpy(hidden).requires_grad_()
            weight_VE = torch.from_numpy(padded[rank * each : (rank + 1) * each]).requires_grad_()
            logprobs_M = vocab_parallel_logprobs(
                hidden_ME,
                weight_VE,
                torch.from_numpy(targets),
                temperature=temperature,
                vocab_size=cases.VOCABULARY,
                group=group,
                chunk_bytes=4 * each * rows,
            )
            logprobs_M.backward(torch.from_numpy(incoming))
            dist.all_reduce(hidden_ME.grad, group=group)
            shards = [torch.zeros_like(weight_VE) for _ in range(ranks)]
            dist.all_gather(shards, weight_VE.grad, group=group)
            results[f"{name}-{temperature}-logprobs"] = logprobs_M.detach().numpy()
            results[f"{name}-{temperature}-hidden"] = hidden_ME.grad.numpy()
            results[f"{name}-{temperature}-weight"] = torch.cat(shards).numpy()
    if dist.get_rank() == 0:
        np.savez(root / f"{job['name']}.npz", **results)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return result


def memory(job: Job, root: Path) -> None:
    parallel.initialize(cases.LAYOUTS[job["layout"]], seed=0)
    hidden, weight, targets, incoming = cases.vocab_inputs(256, 8, 20_000)
    sizes = {}
    for chunk_bytes in (2**20, 2**30):
        with LargestTensor() as largest:
            vocab_parallel_logprobs(
                torch.from_numpy(hidden).requires_grad_(),
                torch.from_numpy(weight).requires_grad_(),
                torch.from_numpy(targets),
                temperature=0.7,
                vocab_size=20_000,
                group=parallel_state.get_tensor_model_parallel_group(),
                chunk_bytes=chunk_bytes,
            ).backward(torch.from_numpy(incoming))
        sizes[chunk_bytes] = largest.bytes
    write_json(root / "memory.json", sizes)


OPERATIONS = {
    "frozen": frozen,
    "train": train,
    "supervised": supervised,
    "poison": poison,
    "vocab": vocab,
    "memory": memory,
}


def meet_anew(file: Path) -> None:
    """Give the next process group a store of its own: gloo takes addresses left in an old one for its peers'."""
    if os.environ["RANK"] == "0":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(str(port))
        unfinished.rename(file)
    while not file.exists():
        time.sleep(0.002)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_ADDR="127.0.0.1", MASTER_PORT=file.read_text())


def main() -> None:
    launch, root = sys.argv[1], Path(sys.argv[2])
    for number, job in enumerate(cases.jobs_of(launch, root)):
        meet_anew(root / f"port-{launch}-{number}")
        OPERATIONS[job["op"]](job, root)
        parallel.shutdown()


if __name__ == "__main__":
    main()
