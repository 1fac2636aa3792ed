"""Trainers that offload their memory between all calls."""

from pathlib import Path

import megatron_data as data
from megatron_jobs.lora import adapters_of, lora_job
from megatron_jobs.training import train_job
from megatron_ranks import Job, optimizer_of, record, save, saved, trainer_of, write_json
from megatron_registry import jobs, operation
from megatron_samples import columns_of, updated
from megatron_turns import AFTER_UPDATE, BEFORE_UPDATE, InTurns

from roll_opd.config.plan import MicroBatchLimits
from roll_opd.megatron import training_state
from roll_opd.megatron.export import save_hf
from roll_opd.models.device_phases import Phase

# trainers whose memory comes and goes: layout, model, distributed optimizer, tokens a micro-batch, and what is special
TURNS = [
    ("tp1", "qwen3_tied", False, None, "fp32"),
    ("dp2", "qwen3_tied", True, 70, "fp32"),
    ("dp2", "deep", True, 70, "bf16"),
    ("tp2sp", "deep", True, 70, "bf16"),
    ("dp2", "deep", True, 70, "lora"),
]


@jobs
def turns_jobs() -> list[Job]:
    """The jobs of `TURNS`: the training of another job, with memory that is offloaded and loaded."""
    found = []
    for layout, model, distributed, tokens, dtype in TURNS:
        same = lora_job(layout) if dtype == "lora" else train_job(layout, model, distributed, tokens)
        name = f"half-{layout}" if dtype == "bf16" else same["name"]
        extra = {"dtype": dtype} if dtype == "bf16" else {}
        found.append({**same, **extra, "op": "turns", "as": name, "name": f"turns-{name}"})
    return found


@operation
def turns(job: Job, root: Path) -> None:
    """Train like the job `as`, and offload and load the memory between all calls."""
    if job["as"].startswith("lora"):
        trainer = adapters_of(job, root)
        objective, count = "opd", 12
    else:
        trainer = trainer_of(job, root, optimizer_of(job, job["distributed"]), MicroBatchLimits(tokens=job["tokens"]))
        objective, count = data.TRAIN_MODELS[job["model"]], 12
    in_turns = InTurns(trainer)
    records = []
    for step in range(data.UPDATES):
        in_turns.phases(*BEFORE_UPDATE)
        samples = data.train_samples(step, objective, count)
        records.append(record(updated(trainer, samples, data.OBJECTIVES[objective], data.TEMPERATURE)))
        in_turns.phases(*AFTER_UPDATE)
        if step == 0:
            in_turns.in_any_order()
    in_turns.phase(Phase.CHECKPOINT)
    save(trainer, root / f"{job['name']}.ckpt")
    in_turns.phase(Phase.GENERATE)  # while the copies are written
    saved()
    in_turns.phase(Phase.RESTORE)
    training_state.load_state(trainer, root / f"{job['name']}.ckpt")
    in_turns.phases(Phase.GENERATE, Phase.WEIGHT_SYNC)
    write_json(root / f"{job['name']}.json", records)
    write_json(root / f"{job['name']}-sizes.json", in_turns.sizes)
    save_hf(trainer, root / f"{job['name']}.hf")
    with_loss = data.OBJECTIVES[objective]
    batch = columns_of(data.train_samples(0, objective, count), with_loss)
    in_turns.keep_gradient(
        lambda: trainer.forward_backward(batch, with_loss, data.TEMPERATURE), lambda: trainer.optim_step(0.0)
    )
