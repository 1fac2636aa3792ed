"""Adapters: trained, saved, exported, resumed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
from megatron_ranks import Job, held, meet_anew, optimizer_of, record, save, saved, write_arrays, write_json
from megatron_registry import jobs, operation
from megatron_samples import updated

from roll_opd.config.plan import LoraPlan, MegatronPlan, MicroBatchLimits, ModelPlan, ObjectivePlan, TrainPlan
from roll_opd.megatron import parallel, training_state
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.export import save_adapter, save_hf
from roll_opd.megatron.student_engine import MegatronTrainer

# layout -> its adapters: all layers, some of what Megatron has in one, or those of attention between experts
LORA_LAYOUTS = {
    "tp1": "all",
    "tp2": "all",
    "tp2sp": "all",
    "pp2": "all",
    "dp2": "all",
    "cp2": "all",
    "pp2vpp2": "all",
    "tp2dp2": "all",
    "tp2sppp2": "some",
    "tp2spcp2": "some",
    "ep2": "attention",
    "tp2ep2": "experts",
    "pp2ep2": "experts",
}
LORA_TARGETS = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "some": ("q_proj", "v_proj", "down_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "experts": ("o_proj", "gate_proj", "up_proj", "down_proj", "k_proj"),
}
LORA_MODELS = {"all": "deep", "some": "deep", "attention": "qwen3_moe", "experts": "qwen3_moe"}
LORA = {"rank": 3, "alpha": 5.0}
# (layout that saved, that loads)
LORA_RESUMES = [("tp2", "pp2"), ("dp2", "tp2"), ("cp2", "tp2"), ("tp2", "tp2"), ("pp2ep2", "tp2ep2")]
CHANGED = ("tp2", "tp2")  # resumed with changed settings: (layout that saved, that loads)


def lora_job(layout: str, loads: str | None = None) -> dict[str, Any]:
    return {
        "op": "lora",
        "name": f"lora-{layout}" + (f"-resumed-{loads}" if loads else ""),
        "layout": loads or layout,
        "model": LORA_MODELS[LORA_LAYOUTS[layout]],
        "targets": LORA_TARGETS[LORA_LAYOUTS[layout]],
        "load": f"lora-{layout}.ckpt" if loads else None,
        "save": not loads and layout in {saved for saved, _ in LORA_RESUMES},
    }


def adapters_of(job: Job, root: Path) -> MegatronTrainer:
    layout, path = layouts.LAYOUTS[job["layout"]], layouts.model_path(root, job["model"])
    adapter = str(root / "models" / f"adapter-{len(job['targets'])}")
    plan = TrainPlan(
        "train",
        ModelPlan(path),
        tuple(range(layout.world_size)),
        layout,
        MicroBatchLimits(tokens=100),
        train_limits=MicroBatchLimits(tokens=70),
        optimizer=optimizer_of(job, True),
        lora=LoraPlan(job["targets"], path=adapter, **LORA),
    )
    return MegatronTrainer(plan, seed=0)


@operation
def lora(job: Job, root: Path) -> None:
    """Train adapters from their state on disk; save and export them."""
    trainer = adapters_of(job, root)
    plan, layout = trainer.plan, trainer.plan.layout
    devices, path = plan.devices, plan.model.path
    if job["load"]:
        training_state.load_state(trainer, root / job["load"])
    sequences = data.sequences(layouts.VOCABULARY)
    with trainer.adapters.disabled():
        write_arrays(root / f"{job['name']}-off.npz", trainer.compute_logprobs(sequences, 1.0))
    records = []
    for step in range(data.SAVED_AFTER if job["load"] else 0, data.UPDATES):
        records.append(record(updated(trainer, data.train_samples(step, "opd"), ObjectivePlan(), data.TEMPERATURE)))
        if job["save"] and step + 1 == data.SAVED_AFTER:
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


@jobs
def lora_jobs() -> Iterator[Job]:
    for layout in LORA_LAYOUTS:
        yield lora_job(layout)
    for saves, loads in LORA_RESUMES:
        yield lora_job(saves, loads)
    yield {**lora_job(*CHANGED), "name": "changed-lora", "changed": True}
