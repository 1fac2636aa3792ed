"""Log-probs and exported weights of a frozen model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
from megatron_layouts import demo_models, models
from megatron_ranks import Job, write_arrays
from megatron_registry import jobs, operation

from roll_opd.config.plan import MegatronPlan, MicroBatchLimits, ModelPlan
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.export import save_hf

FROZEN_LAYOUTS = ("tp1", "tp2", "tp2sp", "pp2", "dp2", "tp2pp2", "tp2sppp2", "cp2", "tp2spcp2", "pp2vpp2")


def _frozen_job(layout: str, model: str, kind: str) -> dict[str, Any]:
    name = f"{kind}-{model}-{layout}"
    return {"op": "frozen", "name": name, "model": model, "layout": layout, "deterministic": kind != "ordinary"}


@operation
def frozen(job: Job, root: Path) -> None:
    layout = layouts.LAYOUTS[job["layout"]]
    path = layouts.model_path(root, job["model"])
    plan = MegatronPlan("frozen", ModelPlan(path), tuple(range(layout.world_size)), layout, MicroBatchLimits())
    engine = MegatronEngine(plan, seed=0, deterministic=job["deterministic"])
    sequences = data.sequences_for(job["model"])
    for name, (rows, tokens, temperature, engine.share_prefixes) in data.PASSES.items():
        engine.plan = replace(plan, forward_limits=MicroBatchLimits(sequences=rows, tokens=tokens))
        write_arrays(root / f"{job['name']}-{name}.npz", engine.compute_logprobs(sequences, temperature))
    write_arrays(root / f"{job['name']}-lonely.npz", engine.compute_logprobs(sequences[:1], 1.0))
    save_hf(engine, root / f"{job['name']}.hf")


@jobs
def frozen_jobs() -> Iterator[Job]:
    for layout in FROZEN_LAYOUTS:
        for model in (*models(layout), *demo_models(layout)):
            yield _frozen_job(layout, model, "frozen")
        for model in demo_models(layout):
            yield _frozen_job(layout, model, "ordinary")
