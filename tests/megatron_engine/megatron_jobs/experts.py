"""Mixtures of experts: scored, trained, saved, exported."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import numpy as np
from megatron_jobs.followers import check_ways_out
from megatron_layouts import EXPERT_MODELS
from megatron_ranks import Job, held, record, save, saved, trainer_of, write_arrays, write_json
from megatron_registry import jobs, operation
from megatron_samples import updated

from roll_opd.config.plan import MicroBatchLimits, ObjectivePlan
from roll_opd.megatron import training_state
from roll_opd.megatron.export import save_hf

EXPERT_LAYOUTS = ("tp1", "tp2sp", "pp2", "ep2", "tp2ep2", "cp2ep2", "ep4", "pp2ep2", "tp2etp2ep2")
LATENT_LAYOUTS = {
    "deepseek_v3": ("cp2ep2", "pp2ep2", "tp2etp2ep2"),
    "deepseek_v2": ("tp2sp",),
}
EXPERT_GRID = [(model, layout) for layout in EXPERT_LAYOUTS for model in EXPERT_MODELS]
EXPERT_GRID += [("qwen3_moe", "tp2etp1")]  # each tensor rank has all experts
EXPERT_GRID += [(model, layout) for model, layouts in LATENT_LAYOUTS.items() for layout in layouts]
BIAS_RATES = {"deepseek_v3": 0.03}  # model -> how far biases of routers move in an update
EXPERT_RESUMES = [  # (model, layout that saved, that loads)
    ("qwen3_moe", "ep2", "tp2sp"),
    ("qwen3_moe", "tp2ep2", "ep2"),
    ("qwen3_moe", "ep2", "ep2"),
    ("deepseek_v3", "cp2ep2", "tp2ep2"),
]
CHANGED = ("qwen3_moe", "ep2", "ep2")  # resumed with changed settings: (model, layout that saved, that loads)


def _experts_job(layout: str, model: str, saved: str | None = None) -> dict[str, Any]:
    saves = (model, layout) in {(of, saved) for of, saved, _ in EXPERT_RESUMES}
    return {
        "op": "experts",
        "name": f"experts-{model}-{layout}" if saved is None else f"experts-resume-{model}-{saved}-{layout}",
        "model": model,
        "layout": layout,
        "save": saves and saved is None,
        "load": saved and f"experts-{model}-{saved}.ckpt",
        "megatron_args": {"moe_router_bias_update_rate": BIAS_RATES[model]} if model in BIAS_RATES else {},
    }


@operation
def experts(job: Job, root: Path) -> None:
    """Score, train, save and export a mixture of experts."""
    limits = MicroBatchLimits(tokens=70)
    trainer = trainer_of(job, root, data.optimizer_plan(True, changed=job.get("changed", False)), limits)
    if job["load"]:
        training_state.load_state(trainer, root / job["load"])
    else:
        for name, (rows, tokens, temperature, trainer.share_prefixes) in data.PASSES.items():
            trainer.plan = replace(trainer.plan, forward_limits=MicroBatchLimits(sequences=rows, tokens=tokens))
            found = trainer.compute_logprobs(data.sequences(layouts.VOCABULARY), temperature)
            write_arrays(root / f"{job['name']}-{name}.npz", found)
        write_arrays(root / f"{job['name']}-lonely.npz", trainer.compute_logprobs([(np.arange(9), 3)], 1.0))
        save_hf(trainer, root / f"{job['name']}-start.hf")
        if job["model"] == "qwen2_moe":  # with shared experts
            check_ways_out(trainer)
        trainer.share_prefixes = False
    records = []
    for step in range(data.SAVED_AFTER if job["load"] else 0, data.UPDATES):
        records.append(record(updated(trainer, data.train_samples(step, "opd"), ObjectivePlan(), data.TEMPERATURE)))
        if job["save"] and step + 1 == data.SAVED_AFTER:
            save(trainer, root / f"{job['name']}.ckpt")
    saved()
    write_json(root / f"{job['name']}.json", records)
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)


@jobs
def experts_jobs() -> Iterator[Job]:
    for model, layout in EXPERT_GRID:
        yield _experts_job(layout, model)
    for model, saves, loads in EXPERT_RESUMES:
        yield _experts_job(loads, model, saves)
    model, saves, loads = CHANGED
    yield {**_experts_job(loads, model, saves), "name": "changed-experts", "changed": True}
