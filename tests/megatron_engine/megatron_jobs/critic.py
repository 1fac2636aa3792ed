"""A critic: its values, updates, checkpoints and resumes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
from megatron_jobs.training import TRAIN_LAYOUTS
from megatron_layouts import LAYOUTS
from megatron_ranks import Job, record, save, saved, write_arrays, write_json
from megatron_registry import jobs, operation
from megatron_samples import value_columns_of

from roll_opd.config.plan import CriticPlan, MicroBatchLimits, ModelPlan
from roll_opd.megatron import training_state
from roll_opd.megatron.critic_engine import MegatronCritic, save_critic_hf

CRITIC_LAYOUTS = tuple(name for name in TRAIN_LAYOUTS if not LAYOUTS[name].vpp)


def critic_name(layout: str, model: str = "valued") -> str:
    return f"critic-{model}-{layout}"


def _critic_job(layout: str, model: str) -> dict[str, Any]:
    name = critic_name(layout, model)
    return {"op": "critic", "name": name, "layout": layout, "model": model, "save": layout in ("tp2", "dp2")}


CRITIC_RESUMES = [("tp2", "tp2"), ("tp2", "pp2"), ("dp2", "tp2")]  # (layout that saved, layout that loads)
CHANGED = ("tp2", "pp2")  # resumed with changed settings: (layout that saved, that loads)


def critic_resume_name(saved: str, loads: str) -> str:
    return f"critic-resume-{saved}-{loads}"


@operation
def critic(job: Job, root: Path) -> None:
    """Compute values, train and save; or load the saved state and continue."""
    layout = layouts.LAYOUTS[job["layout"]]
    plan = CriticPlan(
        "critic",
        ModelPlan(layouts.model_path(root, job["model"])),
        tuple(range(layout.world_size)),
        layout,
        MicroBatchLimits(tokens=100),
        train_limits=MicroBatchLimits(tokens=70),
        optimizer=data.optimizer_plan(True, changed=job.get("changed", False)),
        value_clip=data.VALUE_CLIP,
    )
    model = MegatronCritic(plan, seed=0)
    if "load" in job:
        training_state.load_state(model, root / job["load"])
    write_arrays(root / f"{job['name']}-values.npz", model.values(data.sequences(layouts.VOCABULARY)))
    records = []
    for step in range(data.SAVED_AFTER if "load" in job else 0, data.UPDATES):
        result = model.update(value_columns_of(data.value_samples(step)))
        records.append(record(result))
        if job["save"] and step + 1 == data.SAVED_AFTER:
            save(model, root / f"{job['name']}.ckpt")
    saved()
    write_json(root / f"{job['name']}.json", records)
    save_critic_hf(model, root / f"{job['name']}.hf")


@jobs
def critic_jobs() -> Iterator[Job]:
    for layout in CRITIC_LAYOUTS:
        yield _critic_job(layout, "valued")
    yield _critic_job("tp1", "qwen3")
    for saves, loads in CRITIC_RESUMES:
        yield _resumed_job(saves, loads)
    yield {**_resumed_job(*CHANGED), "name": "changed-critic", "changed": True}


def _resumed_job(saves: str, loads: str) -> Job:
    return {
        **_critic_job(loads, "valued"),
        "name": critic_resume_name(saves, loads),
        "save": False,
        "load": f"{critic_name(saves)}.ckpt",
    }
