"""Four ranks that do the jobs of `megatron_cases.jobs`, as tests ask for them, and write what they found.

    megatron_worker.py ROOT

Importing Megatron's engine patches torch on a CPU, so this never runs inside the test process.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import megatron_cases as cases
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron_turns import AFTER_UPDATE, BEFORE_UPDATE, InTurns
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from roll_opd.algorithms.divergences import divergence, topk_divergence
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import (
    CriticPlan,
    FollowingPlan,
    LoraPlan,
    MegatronPlan,
    MicroBatchLimits,
    ModelPlan,
    ObjectivePlan,
    OptimizerPlan,
    TrainPlan,
)
from roll_opd.megatron import checkpoint, parallel
from roll_opd.megatron import learner as learner_module
from roll_opd.megatron.critic import MegatronCritic, save_critic_hf
from roll_opd.megatron.divergence import shard_of_head, vocab_parallel_divergence, vocab_parallel_entropy
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.export import hf_tensors, hf_tensors_everywhere, save_adapter, save_hf, weight_buckets
from roll_opd.megatron.follower import MegatronFollower
from roll_opd.megatron.learner import MegatronLearner
from roll_opd.megatron.logprobs import vocab_parallel_logprobs, vocab_parallel_topk
from roll_opd.megatron.model import build_model
from roll_opd.megatron.trainer import MegatronTrainer
from roll_opd.models.device_phases import Phase
from roll_opd.models.memory import shard_of, train_memory
from roll_opd.models.model_info import read_model
from roll_opd.samples.training import TeacherTargets, TrainResult
from roll_opd.samples.weight_bucket import BucketMemory, map_bucket

Job = dict[str, Any]
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
PR_SET_PDEATHSIG = 1  # of prctl(2)
WRITER = ThreadPoolExecutor(1)
SAVES: list[Future[list[Path]]] = []
STORES: list[dist.Store] = []  # where this process's groups meet, while it is rank 0 of them


def frozen(job: Job, root: Path) -> None:
    layout = cases.LAYOUTS[job["layout"]]
    path = cases.model_path(root, job["model"])
    plan = MegatronPlan("frozen", ModelPlan(path), tuple(range(layout.world_size)), layout, MicroBatchLimits())
    engine = MegatronEngine(plan, seed=0, deterministic=job["deterministic"])
    sequences = cases.sequences_for(job["model"])
    for name, (rows, tokens, temperature, engine.share_prefixes) in cases.PASSES.items():
        engine.plan = replace(plan, forward_limits=MicroBatchLimits(sequences=rows, tokens=tokens))
        write_arrays(root / f"{job['name']}-{name}.npz", engine.compute_logprobs(sequences, temperature))
    write_arrays(root / f"{job['name']}-lonely.npz", engine.compute_logprobs(sequences[:1], 1.0))
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


def optimizer_of(job: Job, distributed: bool) -> OptimizerPlan:
    """That of `cases`, with what the job overlaps."""
    plan = cases.optimizer_plan(distributed, changed=job.get("changed", False))
    overlaps = job.get("as", job["name"]) in cases.OVERLAPPED
    learner_module.DistributedDataParallelConfig = partial(  # Megatron's own buckets hold 40 M values
        DistributedDataParallelConfig, bucket_size=cases.BUCKET if overlaps else None
    )
    return replace(plan, overlap_grad_reduce=overlaps, overlap_param_gather=overlaps)


def trainer_of(job: Job, root: Path, optimizer: OptimizerPlan, limits: MicroBatchLimits) -> MegatronTrainer:
    layout = cases.LAYOUTS[job["layout"]]
    path = cases.model_path(root, job["model"])
    devices = tuple(range(layout.world_size))
    model = ModelPlan(path, job.get("dtype", "fp32"))
    args = FrozenDict(job.get("megatron_args", {}))
    plan = TrainPlan(
        "train", model, devices, layout, MicroBatchLimits(), args, train_limits=limits, optimizer=optimizer
    )
    return MegatronTrainer(plan, seed=0)


def train(job: Job, root: Path) -> None:
    objective = cases.TRAIN_MODELS[job["model"]]
    limits = MicroBatchLimits(tokens=job["tokens"])
    trainer = trainer_of(job, root, optimizer_of(job, job["distributed"]), limits)
    if job["load"]:
        checkpoint.load_state(trainer, root / job["load"])
    records = []
    for step in range(cases.SAVED_AFTER if job["load"] else 0, cases.UPDATES):
        samples = cases.train_samples(step, objective, job["count"])
        result = trainer.update(samples, cases.OBJECTIVES[objective], cases.TEMPERATURE)
        records.append(record(result))
        if step == 0:
            write_arrays(root / f"{job['name']}-first.npz", result.logprobs)
        if step + 1 == job["save_after"]:
            save(trainer, root / f"{job['name']}.ckpt")
    saved()
    write_json(root / f"{job['name']}.json", records)
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)


def experts(job: Job, root: Path) -> None:
    """Score, train, save and export a mixture of experts."""
    limits = MicroBatchLimits(tokens=70)
    trainer = trainer_of(job, root, cases.optimizer_plan(True, changed=job.get("changed", False)), limits)
    if job["load"]:
        checkpoint.load_state(trainer, root / job["load"])
    else:
        for name, (rows, tokens, temperature, trainer.share_prefixes) in cases.PASSES.items():
            trainer.plan = replace(trainer.plan, forward_limits=MicroBatchLimits(sequences=rows, tokens=tokens))
            found = trainer.compute_logprobs(cases.sequences(cases.VOCABULARY), temperature)
            write_arrays(root / f"{job['name']}-{name}.npz", found)
        write_arrays(root / f"{job['name']}-lonely.npz", trainer.compute_logprobs([(np.arange(9), 3)], 1.0))
        save_hf(trainer, root / f"{job['name']}-start.hf")
        trainer.share_prefixes = False
    records = []
    for step in range(cases.SAVED_AFTER if job["load"] else 0, cases.UPDATES):
        records.append(record(trainer.update(cases.train_samples(step, "opd"), ObjectivePlan(), cases.TEMPERATURE)))
        if job["save"] and step + 1 == cases.SAVED_AFTER:
            save(trainer, root / f"{job['name']}.ckpt")
    saved()
    write_json(root / f"{job['name']}.json", records)
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)


def replay(job: Job, root: Path) -> None:
    """Score and train with routes from elsewhere."""
    layout = cases.LAYOUTS[job["layout"]]
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plan = TrainPlan(
        "train",
        ModelPlan(cases.model_path(root, job["model"])),
        tuple(range(layout.world_size)),
        layout,
        MicroBatchLimits(tokens=100),
        megatron_args=FrozenDict(again if cases.REPLAYS[job["model"], job["layout"]] else {}),
        train_limits=MicroBatchLimits(tokens=70),
        optimizer=optimizer_of(job, True),
        router_replay="R3",
    )
    trainer = MegatronTrainer(plan, seed=0)
    sequences = cases.sequences(cases.VOCABULARY)
    for trainer.share_prefixes in (False, True):
        taken = [cases.routes_of(tokens) if number != 2 else None for number, (tokens, _) in enumerate(sequences)]
        found = trainer.compute_logprobs(sequences, 1.0, taken)
        write_arrays(root / f"{job['name']}-{'shared' if trainer.share_prefixes else 'pack'}.npz", found)
    trainer.share_prefixes = False
    records = []
    for step in range(cases.UPDATES):
        samples = [replace(s, routes=cases.routes_of(s.tokens)) for s in cases.train_samples(step, "opd")]
        records.append(record(trainer.update(samples, ObjectivePlan(), cases.TEMPERATURE)))
    write_json(root / f"{job['name']}.json", records)
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)


def routers(job: Job, root: Path) -> None:
    """Losses and gradients of routers' own losses, each by itself: nothing else has a gradient."""
    losses, tokens = cases.ROUTER_LAYOUTS[job["layout"]]
    found: dict[str, np.ndarray] = {}
    for number, name in enumerate(losses):
        if number:
            parallel.shutdown()
            meet_anew(root / f"port-{job['name']}-{name}")
        layout = cases.LAYOUTS[job["layout"]]
        plan = TrainPlan(
            "train",
            ModelPlan(cases.model_path(root, cases.EXPERT_MODELS[0])),
            tuple(range(layout.world_size)),
            layout,
            MicroBatchLimits(),
            megatron_args=FrozenDict(cases.ROUTER_COEFFICIENTS[name]),
            train_limits=MicroBatchLimits(tokens=tokens),
            optimizer=STILL,
        )
        trainer = MegatronTrainer(plan, seed=0)
        samples = [
            replace(
                s, opd_coefficients=0 * s.opd_coefficients, opd_teacher=0 * s.opd_teacher, advantages=0 * s.advantages
            )
            for s in cases.train_samples(3, "opd")
        ]
        trainer.update(samples, ObjectivePlan(), cases.TEMPERATURE)
        found[f"{name}-gradient"] = gradient(trainer)
        value = trainer.router_losses.values.get(name, torch.zeros(()))
        dist.all_reduce(value)
        found[name] = value.numpy()
    write_results(root / f"{job['name']}.npz", found)


def adapters_of(job: Job, root: Path) -> MegatronTrainer:
    layout, path = cases.LAYOUTS[job["layout"]], cases.model_path(root, job["model"])
    adapter = str(root / "models" / f"adapter-{len(job['targets'])}")
    plan = TrainPlan(
        "train",
        ModelPlan(path),
        tuple(range(layout.world_size)),
        layout,
        MicroBatchLimits(tokens=100),
        train_limits=MicroBatchLimits(tokens=70),
        optimizer=optimizer_of(job, True),
        lora=LoraPlan(job["targets"], path=adapter, **cases.LORA),
    )
    return MegatronTrainer(plan, seed=0)


def lora(job: Job, root: Path) -> None:
    """Train adapters, which begin as they are on disk; save and export them."""
    trainer = adapters_of(job, root)
    plan, layout = trainer.plan, trainer.plan.layout
    devices, path = plan.devices, plan.model.path
    if job["load"]:
        checkpoint.load_state(trainer, root / job["load"])
    sequences = cases.sequences(cases.VOCABULARY)
    with trainer.adapters.disabled():
        write_arrays(root / f"{job['name']}-off.npz", trainer.compute_logprobs(sequences, 1.0))
    records = []
    for step in range(cases.SAVED_AFTER if job["load"] else 0, cases.UPDATES):
        records.append(record(trainer.update(cases.train_samples(step, "opd"), ObjectivePlan(), cases.TEMPERATURE)))
        if job["save"] and step + 1 == cases.SAVED_AFTER:
            save(trainer, root / f"{job['name']}.ckpt")
    saved()
    write_json(root / f"{job['name']}.json", records)
    write_arrays(root / f"{job['name']}-on.npz", trainer.compute_logprobs(sequences, 1.0))
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)
    save_adapter(trainer, root / f"{job['name']}.adapter")
    parallel.shutdown()
    meet_anew(root / f"port-{job['name']}")
    fresh = MegatronTrainer(replace(plan, lora=replace(plan.lora, path=None)), seed=0)
    write_arrays(root / f"{job['name']}-zero.npz", fresh.compute_logprobs(sequences, 1.0))
    save_adapter(fresh, root / f"{job['name']}-zero.adapter")
    parallel.shutdown()
    meet_anew(root / f"port-{job['name']}-base")
    bare = MegatronEngine(MegatronPlan("bare", ModelPlan(path), devices, layout, MicroBatchLimits(tokens=100)), seed=0)
    write_arrays(root / f"{job['name']}-base.npz", bare.compute_logprobs(sequences, 1.0))


def turns(job: Job, root: Path) -> None:
    """Train as the job `as` does, while memory comes and goes between all that is done."""
    if job["as"].startswith("lora"):
        trainer = adapters_of(job, root)
        objective, count = "opd", 12
    else:
        trainer = trainer_of(job, root, optimizer_of(job, job["distributed"]), MicroBatchLimits(tokens=job["tokens"]))
        objective, count = cases.TRAIN_MODELS[job["model"]], 12
    in_turns = InTurns(trainer)
    records = []
    for step in range(cases.UPDATES):
        in_turns.phases(*BEFORE_UPDATE)
        samples = cases.train_samples(step, objective, count)
        records.append(record(trainer.update(samples, cases.OBJECTIVES[objective], cases.TEMPERATURE)))
        in_turns.phases(*AFTER_UPDATE)
        if step == 0:
            in_turns.in_any_order()
    in_turns.phase(Phase.CHECKPOINT)
    save(trainer, root / f"{job['name']}.ckpt")
    in_turns.phase(Phase.GENERATE)  # while the copies are written
    saved()
    in_turns.phase(Phase.RESTORE)
    checkpoint.load_state(trainer, root / f"{job['name']}.ckpt")
    in_turns.phases(Phase.GENERATE, Phase.WEIGHT_SYNC)
    write_json(root / f"{job['name']}.json", records)
    write_json(root / f"{job['name']}-sizes.json", in_turns.sizes)
    save_hf(trainer, root / f"{job['name']}.hf")


def invariance(job: Job, root: Path) -> None:
    """Loss and gradient of every policy loss for splits of its batch."""
    trainer = trainer_of({**job, "model": "deep"}, root, STILL, MicroBatchLimits())
    trainer.load_teacher_head("random", cases.teacher_inputs(1)[1])
    write_results(
        root / f"{job['name']}.npz", over_losses(trainer, cases.INVARIANCE_LAYOUTS[job["layout"]], job["losses"])
    )


def over_losses(trainer: MegatronTrainer, splits: tuple[str, ...], losses: list[str]) -> dict[str, np.ndarray]:
    """Loss and gradient of some policy losses for some splits of their batches."""
    found: dict[str, np.ndarray] = {}
    for name in losses:
        objective, samples = cases.invariance_objective(name), cases.invariance_samples(name)
        size = 2 if objective.paired else 1
        units = [samples[first : first + size] for first in range(0, len(samples), size)]

        def update(batch: list, objective: ObjectivePlan = objective) -> TrainResult:
            return trainer.update(batch, objective, cases.TEMPERATURE, cases.SUPERVISED_STEP)

        found |= over_splits(splits, trainer, name, units, update)
    return found


def experts_invariance(job: Job, root: Path) -> None:
    """The same of a mixture of experts."""
    split, _ = cases.EXPERT_INVARIANCE[job["layout"]]
    trainer = trainer_of({**job, "model": "qwen2_moe"}, root, STILL, MicroBatchLimits())
    trainer.load_teacher_head("random", cases.teacher_inputs(1)[1])
    write_results(root / f"{job['name']}.npz", over_losses(trainer, (split,), job["losses"]))


def options(job: Job, root: Path) -> None:
    """Loss and gradient of an update with options of Megatron's."""
    _, _, args = cases.OPTIONS[job["option"]]
    trainer = trainer_of({**job, "megatron_args": args}, root, STILL, MicroBatchLimits(tokens=70))
    result = record(trainer.update(cases.train_samples(3, "opd"), ObjectivePlan(), 1.0))
    write_results(
        root / f"{job['name']}.npz", {"loss": np.array(result["weighted_loss"]), "gradient": gradient(trainer)}
    )


def critic_invariance(job: Job, root: Path) -> None:
    """The same of a critic's loss."""
    layout, model = cases.LAYOUTS[job["layout"]], ModelPlan(cases.model_path(root, "deep_valued"))
    plan = CriticPlan("critic", model, tuple(range(layout.world_size)), layout, MicroBatchLimits(), optimizer=STILL)
    critic = MegatronCritic(replace(plan, value_clip=cases.VALUE_CLIP), seed=0)
    units, splits = [[sample] for sample in cases.value_samples(0)], cases.INVARIANCE_LAYOUTS[job["layout"]]
    write_results(root / f"{job['name']}.npz", over_splits(splits, critic, cases.CRITIC_LOSS, units, critic.update))


STILL = OptimizerPlan(learning_rate=0.0, max_grad_norm=1e9, use_distributed_optimizer=False)  # weights stay as they are


def over_splits(
    splits: tuple[str, ...],
    learner: MegatronLearner,
    name: str,
    units: list[list],
    update: Callable[[list], TrainResult],
) -> dict[str, np.ndarray]:
    """Loss and gradient of one batch, split in these ways; a unit is never torn apart."""
    found = {}
    for split in splits:
        sequences, tokens, backwards, learner.share_prefixes = cases.SPLITS[split]
        learner.plan = replace(learner.plan, train_limits=MicroBatchLimits(sequences=sequences, tokens=tokens))
        batch = [sample for unit in (reversed(units) if backwards else units) for sample in unit]
        result = record(update([cases.disturbed(sample) for sample in batch] if split == "observed" else batch))
        found[f"{name}-{split}-loss"] = np.array(result["weighted_loss"])
        found[f"{name}-{split}-gradient"] = gradient(learner)
    return found


def gradient(learner: MegatronLearner) -> np.ndarray:
    """Of all weights in Hugging Face's order, end to end: exported as the weights themselves are."""
    parameters = [parameter for chunk in learner.chunks for parameter in chunk.parameters()]
    values = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    pieces = {name: tensor.flatten().clone() for name, tensor in hf_tensors(learner)}
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)
    return torch.cat([torch.zeros(0), *(pieces[name] for name in sorted(pieces))]).numpy()  # on rank 0


def distil(job: Job, root: Path) -> None:
    """Every way of putting a divergence into the loss, one update each; teachers of other layouts score first."""
    samples = [cases.train_samples(step, "opd") for step in range(len(cases.DISTILLING))]
    layout = cases.LAYOUTS[cases.TEACHER_LAYOUTS[job["layout"]]]
    targets: list[list[dict[str, TeacherTargets]]] = [[{} for _ in batch] for batch in samples]
    heads = {}
    for name, coefficient in cases.TEACHERS.items():
        devices = tuple(range(layout.world_size))
        model = ModelPlan(cases.model_path(root, name))
        limits = MicroBatchLimits(tokens=120)
        plan = MegatronPlan(name, model, devices, layout, limits, vocab_size=cases.VOCABULARY)
        engine = MegatronEngine(plan, seed=0)
        heads[name] = one_of(engine.output_head())
        for step, objective in enumerate(cases.DISTILLING):
            numbers = [n for n in range(len(samples[step])) if cases.looks_at(name, n)]
            sequences = [(samples[step][n].tokens, samples[step][n].prompt_length) for n in numbers]
            full = objective.opd_objective == "full"
            wanted = {"topk": None if full else objective.opd_topk, "hidden": full, "vocab_size": cases.VOCABULARY}
            for place, values in everything(engine.compute_targets(sequences, cases.TEMPERATURE, **wanted)).items():
                logprobs = values.pop("logprobs")
                if objective.opd_topk == cases.VOCABULARY:  # a wider teacher is normalised over the student's ids
                    tokens, prompt = sequences[place]
                    same = values["topk_ids"] == tokens[prompt:, None]
                    np.testing.assert_allclose(logprobs, values["topk_logprobs"][same], rtol=0, atol=1e-5)
                targets[step][numbers[place]][name] = TeacherTargets(coefficient, values)
        ids = [targets[3][n][name].arrays["topk_ids"] for n in numbers]
        again = everything(engine.compute_targets(sequences, cases.TEMPERATURE, ids=ids, vocab_size=cases.VOCABULARY))
        for place, values in again.items():
            before = targets[3][numbers[place]][name].arrays
            if not all(np.array_equal(values[key], before[key]) for key in ("topk_logprobs", "topk_rest")):
                raise RuntimeError("the same tokens have other log-probs when they are asked for")
        parallel.shutdown()
        meet_anew(root / f"port-{job['name']}-{name}")
    trainer = trainer_of({**job, "model": "qwen3_tied"}, root, cases.optimizer_plan(True), MicroBatchLimits(tokens=70))
    for name, head in heads.items():
        trainer.load_teacher_head(name, head)
    records = []
    for batch, teachers, objective in zip(samples, targets, cases.DISTILLING, strict=True):
        batch = [replace(sample, teachers=of_sample) for sample, of_sample in zip(batch, teachers, strict=True)]
        result = trainer.update(batch, objective, cases.TEMPERATURE)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, result.sums)
        loss = sum(sums.get("weighted_loss", 0.0) for sums in everyone)
        records.append({"loss": loss, "grad_norm": result.grad_norm, "applied": result.applied})
    write_json(root / f"{job['name']}.json", records)
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)


def one_of(value: Any) -> Any:
    """What the one rank has that has something."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, value)
    (found,) = (share for share in shares if share is not None)
    return found


def everything(mine: dict | None) -> dict:
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    return {number: values for share in shares for number, values in (share or {}).items()}


def record(result: TrainResult) -> dict[str, Any]:
    """What all ranks say of one update: sums over them, and what each must say alike."""
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
    """Write the bytes that this rank holds after an update, part by part, and what the plan says of them."""
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
    """Begin to write the state, while the job goes on; see `saved`."""
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    SAVES.append(WRITER.submit(checkpoint.save_state(learner, directory, later=True)))


def saved() -> None:
    """Wait for what is being saved: each rank knows the files of all."""
    while SAVES:
        files = SAVES.pop().result()
        assert files and all(file.is_file() for file in files), files


def critic(job: Job, root: Path) -> None:
    """Value, learn and save; or take up what was saved, and go on."""
    layout = cases.LAYOUTS[job["layout"]]
    plan = CriticPlan(
        "critic",
        ModelPlan(cases.model_path(root, job["model"])),
        tuple(range(layout.world_size)),
        layout,
        MicroBatchLimits(tokens=100),
        train_limits=MicroBatchLimits(tokens=70),
        optimizer=cases.optimizer_plan(True, changed=job.get("changed", False)),
        value_clip=cases.VALUE_CLIP,
    )
    model = MegatronCritic(plan, seed=0)
    if "load" in job:
        checkpoint.load_state(model, root / job["load"])
    write_arrays(root / f"{job['name']}-values.npz", model.values(cases.sequences(cases.VOCABULARY)))
    records = []
    for step in range(cases.SAVED_AFTER if "load" in job else 0, cases.UPDATES):
        result = model.update(cases.value_samples(step))
        records.append(record(result))
        if job["save"] and step + 1 == cases.SAVED_AFTER:
            save(model, root / f"{job['name']}.ckpt")
    saved()
    write_json(root / f"{job['name']}.json", records)
    save_critic_hf(model, root / f"{job['name']}.hf")


def supervised(job: Job, root: Path) -> None:
    """One update, in several micro-batches a rank."""
    limits = MicroBatchLimits(*cases.SUPERVISED_LAYOUTS[job["layout"]])
    trainer = trainer_of({**job, "model": "qwen3_tied"}, root, cases.optimizer_plan(True), limits)
    schema = job["schema"]
    result = trainer.update(cases.supervised_samples(schema), cases.SUPERVISED[schema], 1.0, cases.SUPERVISED_STEP)
    write_json(root / f"{job['name']}.json", record(result))
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)


def write_json(path: Path, value: Any) -> None:
    if dist.get_rank() == 0:
        path.write_text(json.dumps(value))


def poison(job: Job, root: Path) -> None:
    """Bad updates, then a good one; and in a second trainer the good one alone.

    Infinite log-probs of the sampling weights or of the reference policy would be clamped by a ratio and an estimator.
    """
    job = {**job, "model": "qwen3_tied"}
    objective = cases.OBJECTIVES["opd"]
    optimizer = OptimizerPlan(learning_rate=1e-3)  # constant: the bad update's place in the schedule shows nowhere
    good = cases.train_samples(0, "opd")
    referred = replace(objective, kl_loss_coef=0.1)
    place, value = np.flatnonzero(good[7].action_mask)[2], -float(job["value"])
    bad = []
    for name in ("opd_teacher", "old_logprobs", "ref_logprobs"):
        batch = [replace(sample, **{name: sample.opd_teacher.copy()}) for sample in good]
        getattr(batch[7], name)[place] = value
        bad.append(batch)

    trainer = trainer_of(job, root, optimizer, MicroBatchLimits(tokens=70))
    start = weights(trainer)
    applied = [trainer.update(batch, referred, 1.0).applied for batch in bad]
    after_bad = weights(trainer)
    applied.append(trainer.update(good, objective, 1.0).applied)
    after_both = weights(trainer)
    parallel.shutdown()

    meet_anew(root / f"port-{job['name']}")
    trainer = trainer_of(job, root, optimizer, MicroBatchLimits(tokens=70))
    trainer.update(good, objective, 1.0)
    facts = {
        "applied": applied,
        "untouched": identical(start, after_bad),
        "moved": not identical(start, after_both),
        "no_trace": identical(after_both, weights(trainer)),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    write_json(root / f"{job['name']}.json", everyone)


def in_parts(follower: MegatronFollower, weights: Mapping[str, torch.Tensor], parts: int = 3) -> None:
    """Have it follow weights that come in parts, those of one parameter in different ones."""
    names = list(weights)
    for part in range(parts):
        sent = {name: weights[name].clone() for name in names[part::parts]}
        follower.follow(sent, last=part == parts - 1)
        for tensor in sent.values():  # of memory that the next part is written to
            tensor.fill_(torch.nan)


def check_ways_out(engine: MegatronEngine, limit: int = 60_000) -> None:
    """Weights in buckets, and on every rank, are the whole tensors that rank 0 has."""
    whole = {name: tensor.clone() for name, tensor in hf_tensors(engine)}
    box: list[Any] = [{name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()}]
    dist.broadcast_object_list(box, 0)
    everywhere = {name: tensor.clone() for name, tensor in hf_tensors_everywhere(engine, box[0])}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, everywhere)
    memories, arrived, lasts = [BucketMemory(), BucketMemory()], {}, []
    for memory, last in weight_buckets(engine, memories, torch.float32, limit):
        _, tensors = map_bucket(**memory.describe())
        assert memory.size <= limit or len(tensors) == 1
        arrived |= {name: tensor.clone() for name, tensor in tensors}
        lasts.append(last)
    for memory in memories:
        memory.close()
    if dist.get_rank() == 0:
        assert list(everywhere) == list(arrived) == list(whole)
        assert all(identical(whole, other) for other in (arrived, *everyone))
        assert len(lasts) > 2 and lasts == [False] * (len(lasts) - 1) + [True]
    else:
        assert not whole and not arrived


def follow(job: Job, root: Path) -> None:
    """Follow a student that learns; and again from a checkpoint before the last time, in a new model."""
    layout = cases.LAYOUTS[job["layout"]]
    for model, dtype in cases.FOLLOWED.items():
        path = cases.model_path(root, model)
        start = load_file(f"{path}/model.safetensors")
        students = [cases.learned(start, times) for times in range(cases.FOLLOWED_TIMES)]
        for decay in cases.DECAYS:
            name, saved = f"{job['name']}-{model}-{decay}", root / f"{job['name']}-{model}-{decay}.saved"
            devices = tuple(range(layout.world_size))
            limits = MicroBatchLimits(tokens=100)
            plan = FollowingPlan(name, ModelPlan(path, dtype), devices, layout, limits, decay=decay)
            follower = MegatronFollower(plan, seed=0)
            untouched = weights(follower)
            in_parts(follower, start)
            if not identical(untouched, weights(follower)):
                raise RuntimeError("a model that follows what it is has changed")
            for student in students[:-1]:
                in_parts(follower, student)
            follower.save(saved)
            in_parts(follower, students[-1])
            once = weights(follower)
            check_ways_out(follower)
            write_arrays(root / f"{name}.npz", follower.compute_logprobs(cases.sequences(cases.VOCABULARY), 1.0))
            follower.save(root / f"{name}.hf")
            parallel.shutdown()
            meet_anew(root / f"port-{name}-again")
            follower = MegatronFollower(plan, seed=0)
            dist.barrier()
            follower.load(saved)
            in_parts(follower, students[-1])
            if not identical(once, weights(follower)):
                raise RuntimeError("a resumed follower is another one")
            parallel.shutdown()
            meet_anew(root / f"port-{name}-next")


def weights(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """This rank's own."""
    own = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
    return {str(number): parameter.detach().clone() for number, parameter in enumerate(own)}


def identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@dataclass(frozen=True)
class Shard:
    """This rank's part of a vocabulary whose padded rows are full of large numbers that must not count."""

    group: dist.ProcessGroup
    each: int  # rows of the output embedding on each rank

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def first(self) -> int:
        return dist.get_rank(self.group) * self.each

    def rows(self, weight: np.ndarray) -> torch.Tensor:
        padded = np.full((self.each * self.ranks, weight.shape[1]), 50.0, np.float32)
        padded[: len(weight)] = weight
        return torch.from_numpy(padded[self.first : self.first + self.each]).requires_grad_()

    def gradients(self, hidden_ME: torch.Tensor, weight_grad_VE: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        dist.all_reduce(hidden_ME.grad, group=self.group)
        shards = [torch.zeros_like(weight_grad_VE) for _ in range(self.ranks)]
        dist.all_gather(shards, weight_grad_VE, group=self.group)
        return hidden_ME.grad.numpy(), torch.cat(shards).numpy()


def vocabulary(job: Job) -> Shard:
    parallel.initialize(cases.LAYOUTS[job["layout"]], seed=0)
    group = parallel_state.get_tensor_model_parallel_group()
    return Shard(group, cases.VOCABULARY // dist.get_world_size(group) + 1)


def vocab(job: Job, root: Path) -> None:
    """Log-probs and gradients for every chunk size."""
    shard = vocabulary(job)
    hidden, weight, targets, incoming = cases.vocab_inputs(cases.VOCAB_ROWS, cases.VOCAB_WIDTH, cases.VOCABULARY)
    results = {}
    for name, rows in cases.VOCAB_CHUNK_ROWS.items():
        for temperature in (1.0, 0.7):
            hidden_ME, weight_VE = torch.from_numpy(hidden).requires_grad_(), shard.rows(weight)
            logprobs_M = vocab_parallel_logprobs(
                hidden_ME,
                weight_VE,
                torch.from_numpy(targets),
                temperature=temperature,
                vocab_size=cases.VOCABULARY,
                group=shard.group,
                chunk_bytes=4 * shard.each * rows,
            )
            logprobs_M.backward(torch.from_numpy(incoming))
            key = f"{name}-{temperature}"
            results[f"{key}-logprobs"] = logprobs_M.detach().numpy()
            results[f"{key}-hidden"], results[f"{key}-weight"] = shard.gradients(hidden_ME, weight_VE.grad)
    write_results(root / f"{job['name']}.npz", results)


def columns(job: Job, root: Path) -> None:
    """Divergences and entropy; the gradient of the weight goes into a buffer that holds something already."""
    shard = vocabulary(job)
    hidden, weight, _, incoming = cases.vocab_inputs(cases.VOCAB_ROWS, cases.VOCAB_WIDTH, cases.VOCABULARY)
    teacher_hidden, teacher_weight = (torch.from_numpy(x) for x in cases.teacher_inputs(cases.VOCAB_ROWS))
    teacher_shard = shard_of_head(teacher_weight, first=shard.first, columns=shard.each)
    results = {}
    for chunks, rows in cases.VOCAB_CHUNK_ROWS.items():
        for temperature in (1.0, 0.7):
            settings = {"temperature": temperature, "group": shard.group, "chunk_bytes": 4 * shard.each * rows}
            for measure in (*cases.MEASURES, "entropy"):
                hidden_ME, weight_VE = torch.from_numpy(hidden).requires_grad_(), shard.rows(weight)
                grad_VE = torch.ones_like(weight_VE)
                student, settings["weight_grad_VE"] = (hidden_ME, weight_VE), grad_VE
                if measure == "entropy":
                    found_M = vocab_parallel_entropy(*student, vocab_size=cases.VOCABULARY, **settings)
                else:
                    found_M = vocab_parallel_divergence(
                        *student,
                        teacher_hidden,
                        teacher_shard,
                        divergence(measure, **cases.MEASURES[measure]),
                        vocab_size=cases.TEACHER_VOCABULARY,
                        **settings,
                    )
                found_M.backward(torch.from_numpy(incoming))
                key = f"{measure}-{chunks}-{temperature}"
                results[key] = found_M.detach().numpy()
                results[f"{key}-hidden"], results[f"{key}-weight"] = shard.gradients(hidden_ME, grad_VE - 1)
                if weight_VE.grad is not None:
                    raise RuntimeError("the gradient was returned as well")
    write_results(root / f"{job['name']}.npz", results)


def topk(job: Job, root: Path) -> None:
    """The most likely tokens, and their log-probs from the other function, with the gradient of a divergence."""
    shard = vocabulary(job)
    hidden, weight, _, incoming = cases.vocab_inputs(cases.VOCAB_ROWS, cases.VOCAB_WIDTH, cases.VOCABULARY)
    results = {}
    for k in cases.TOPK:
        hidden_ME, weight_VE = torch.from_numpy(hidden).requires_grad_(), shard.rows(weight)
        settings = {
            "temperature": 0.7,
            "vocab_size": cases.VOCABULARY,
            "group": shard.group,
            "chunk_bytes": 4 * shard.each * 7,
        }
        ids_MK, logprobs_ML = vocab_parallel_topk(hidden_ME, weight_VE, k, **settings)
        again_ML = vocab_parallel_logprobs(hidden_ME, weight_VE, ids_MK, with_rest=True, **settings)
        shares = torch.tensor([1.0] * k + [cases.VOCABULARY - k]) / cases.VOCABULARY
        uniform_ML = shares.log().expand_as(again_ML)
        topk_divergence(again_ML, uniform_ML, divergence("reverse_kl")).backward(torch.from_numpy(incoming))
        results |= {f"{k}-ids": ids_MK.numpy(), f"{k}-logprobs": logprobs_ML.numpy()}
        results[f"{k}-again"] = again_ML.detach().numpy()
        results[f"{k}-hidden"], results[f"{k}-weight"] = shard.gradients(hidden_ME, weight_VE.grad)
    write_results(root / f"{job['name']}.npz", results)


def write_results(path: Path, results: dict[str, np.ndarray]) -> None:
    if dist.get_rank() == 0:
        np.savez(path, **results)


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
    settings = {
        "temperature": 0.7,
        "vocab_size": 20_000,
        "group": parallel_state.get_tensor_model_parallel_group(),
    }
    others = {
        "logprobs": (vocab_parallel_logprobs, (torch.from_numpy(targets),)),
        "divergence": (
            vocab_parallel_divergence,
            (torch.from_numpy(hidden), torch.from_numpy(weight), divergence("jsd")),
        ),
    }
    sizes: dict[str, dict[int, int]] = {}
    for name, (function, arguments) in others.items():
        for chunk_bytes in (2**20, 2**30):
            with LargestTensor() as largest:
                student = torch.from_numpy(hidden).requires_grad_(), torch.from_numpy(weight).requires_grad_()
                found_M = function(*student, *arguments, **settings, chunk_bytes=chunk_bytes)
                found_M.backward(torch.from_numpy(incoming))
            sizes.setdefault(name, {})[chunk_bytes] = largest.bytes
    write_json(root / "memory.json", sizes)


def loading(job: Job, root: Path) -> None:
    """Write how far this rank's memory grows at most while a model is loaded, and how much the model's own part is.

    Memory that is no file's: what was freed before is given back first, so that all that is taken shows, and what the
    loading frees is given back at once, so that nothing else does.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 2**20)
    layout = cases.LAYOUTS[job["layout"]]
    plan = MegatronPlan(
        "loaded",
        ModelPlan(cases.model_path(root, job["model"])),
        tuple(range(layout.world_size)),
        layout,
        MicroBatchLimits(),
    )
    parallel.initialize(layout, 0)
    gc.collect()
    libc.malloc_trim(0)
    before, sizes, ended = own_memory(), [], threading.Event()

    def watch() -> None:
        while not ended.wait(0.0005):
            sizes.append(own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    built = build_model(plan, seed=0, trainable=False, exact=True)
    ended.set()
    watcher.join()
    sizes.append(own_memory())  # a busy machine may not have let the watcher look at the end
    share = sum(p.numel() * p.element_size() for chunk in built.chunks for p in chunk.parameters())
    (root / f"{job['name']}-{dist.get_rank()}.json").write_text(json.dumps([max(sizes) - before, share]))


def own_memory() -> int:
    """Bytes of this process that no file has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


OPERATIONS = {
    "loading": loading,
    "experts": experts,
    "lora": lora,
    "turns": turns,
    "routers": routers,
    "replay": replay,
    "frozen": frozen,
    "train": train,
    "options": options,
    "invariance": invariance,
    "experts_invariance": experts_invariance,
    "critic_invariance": critic_invariance,
    "distil": distil,
    "supervised": supervised,
    "critic": critic,
    "poison": poison,
    "follow": follow,
    "vocab": vocab,
    "columns": columns,
    "topk": topk,
    "memory": memory,
    "priorities": lambda job, root: priorities(job, root),
}


def meet_anew(file: Path) -> None:
    """Give the next process group a store of its own: gloo takes addresses left in an old one for its peers'.

    Rank 0 listens from the moment its port is known, so that no other process of the machine can take it.
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


def serve(process: int, requests: Connection, root: Path) -> None:
    """Do the jobs of one rank, until one fails: answer each with None or its traceback."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while (job := requests.recv()) is not None:
        world = cases.LAYOUTS[job["layout"]].world_size
        os.environ.update(RANK=str(process), WORLD_SIZE=str(world))
        try:
            meet_anew(root / f"port-of-{job['name']}")
            OPERATIONS[job["op"]](job, root)
            parallel.shutdown()
        except BaseException:
            requests.send(traceback.format_exc())
            raise
        requests.send(None)


class Ranks:
    """Four forks of this process, which has imported everything that they need."""

    def __init__(self, root: Path) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(cases.RANKS):
            here, there = context.Pipe()
            self.pipes.append(here)
            self.processes.append(context.Process(target=serve, args=(rank, there, root), daemon=True))
            self.processes[-1].start()
            there.close()

    def do(self, job: Job) -> str | None:
        """Do one job; return None, or why it failed."""
        waiting = dict(enumerate(self.pipes[: cases.LAYOUTS[job["layout"]].world_size]))
        for pipe in waiting.values():
            pipe.send(job)
        errors: list[str] = []
        while waiting:  # where one rank fails, those that it has left waiting never answer
            ready = wait(list(waiting.values()), timeout=2 if errors else None)
            if not ready:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answer = waiting.pop(rank).recv()
                except EOFError:
                    answer = "the process died"
                errors += [] if answer is None else [f"rank {rank}: {answer}"]
        return "\n".join(errors) or None

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def main() -> None:
    """Read jobs from standard input, a line each; write how each ended, as JSON, to standard output."""
    answers, root = os.fdopen(os.dup(1), "w"), Path(sys.argv[1])
    os.dup2(2, 1)  # what is printed goes to the log
    ranks = Ranks(root)
    for line in sys.stdin:
        error = ranks.do(json.loads(line))
        if error:
            ranks.end()
            ranks = Ranks(root)
        print(json.dumps(error), file=answers, flush=True)
    ranks.end()


def priorities(job: Job, root: Path) -> None:
    """Write the priorities of the threads that watch the connections of groups, after several of them."""
    for number in range(3):
        parallel.initialize(cases.LAYOUTS[job["layout"]], seed=0)
        dist.barrier()
        parallel.shutdown()
        meet_anew(root / f"port-{job['name']}-{number}")
    parallel.initialize(cases.LAYOUTS[job["layout"]], seed=0)
    (root / f"{job['name']}-{dist.get_rank()}.json").write_text(json.dumps(priorities_of_connections()))
    dist.barrier()


def priorities_of_connections() -> list[int]:
    """Of this process's threads that watch connections of gloo's groups."""
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    names = {thread: Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in threads}
    return [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads if names[thread] == "gloo_tcp_loop"]


if __name__ == "__main__":
    main()
