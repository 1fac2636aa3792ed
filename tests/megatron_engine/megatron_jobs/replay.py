"""Replay of given routes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import megatron_data as data
import megatron_layouts as layouts
from megatron_ranks import Job, held, optimizer_of, record, write_arrays, write_json
from megatron_registry import jobs, operation
from megatron_samples import updated

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import MicroBatchLimits, ModelPlan, ObjectivePlan, TrainPlan
from roll_opd.megatron.export import save_hf
from roll_opd.megatron.student_engine import MegatronTrainer

REPLAYS = {  # (model, layout) -> whether layers are computed again on the way back
    ("qwen2_moe", "tp1"): False,
    ("qwen2_moe", "ep2"): True,
    ("qwen2_moe", "tp2ep2"): False,
    ("qwen2_moe", "cp2ep2"): False,
    ("qwen2_moe", "pp2ep2"): True,
    ("qwen2_moe", "pp2vpp2"): True,
    ("deepseek_v3", "ep2"): False,
    ("deepseek_v3", "pp2vpp2"): True,
}


@operation
def replay(job: Job, root: Path) -> None:
    """Score and train with given routes."""
    layout = layouts.LAYOUTS[job["layout"]]
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plan = TrainPlan(
        "train",
        ModelPlan(layouts.model_path(root, job["model"])),
        tuple(range(layout.world_size)),
        layout,
        MicroBatchLimits(tokens=100),
        megatron_args=FrozenDict(again if REPLAYS[job["model"], job["layout"]] else {}),
        train_limits=MicroBatchLimits(tokens=70),
        optimizer=optimizer_of(job, True),
        router_replay="R3",
    )
    trainer = MegatronTrainer(plan, seed=0)
    sequences = data.sequences(layouts.VOCABULARY)
    for trainer.share_prefixes in (False, True):
        taken = [data.routes_of(tokens) if number != 2 else None for number, (tokens, _) in enumerate(sequences)]
        found = trainer.compute_logprobs(sequences, 1.0, taken)
        write_arrays(root / f"{job['name']}-{'shared' if trainer.share_prefixes else 'pack'}.npz", found)
    trainer.share_prefixes = False
    records = []
    for step in range(data.UPDATES):
        samples = [replace(s, routes=data.routes_of(s.tokens)) for s in data.train_samples(step, "opd")]
        records.append(record(updated(trainer, samples, ObjectivePlan(), data.TEMPERATURE)))
    write_json(root / f"{job['name']}.json", records)
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)


@jobs
def replay_jobs() -> Iterator[Job]:
    for model, layout in REPLAYS:
        yield {"op": "replay", "name": f"replay-{model}-{layout}", "model": model, "layout": layout}
