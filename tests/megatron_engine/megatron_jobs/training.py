"""Updates, checkpoints and resumes of a student: plain, with few samples, in bf16, with changed settings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_data as data
from megatron_data import SAVED_AFTER
from megatron_layouts import LAYOUTS, RANKS
from megatron_ranks import Job, held, optimizer_of, record, save, saved, trainer_of, write_arrays, write_json
from megatron_registry import jobs, operation
from megatron_samples import updated

from roll_opd.config.plan import MicroBatchLimits
from roll_opd.megatron import training_state
from roll_opd.megatron.export import save_hf

TRAIN_LAYOUTS = ("tp1", "tp2", "tp2sp", "pp2", "dp2", "tp2dp2", "tp2pp2", "cp2", "pp2vpp2")
HALF_LAYOUTS = ("tp1", "tp2sp", "pp2", "dp2", "cp2", "pp2vpp2")  # that train in bf16
HALF_PUSHED = ("tp2sp", "dp2")  # on every push; the other dimensions in f32


def few_model(layout: str) -> str:
    """The model that learns from fewer samples than there are ranks."""
    return "deep" if LAYOUTS[layout].vpp else "qwen3_tied"


def train_name(model: str, layout: str, distributed: bool, tokens: int | None) -> str:
    return f"train-{model}-{layout}-{'distributed' if distributed else 'plain'}-{tokens or 'unlimited'}"


def train_variants(layout: str) -> list[tuple[str, bool, int | None]]:
    """(model, distributed optimizer, tokens a micro-batch) to train under `layout`."""
    variants = [("qwen3_tied", True, 70), ("qwen3_tied", False, None), ("qwen2_tied", True, 70)]
    if layout == "cp2":
        variants.append(("deep", True, 70))
    if LAYOUTS[layout].vpp:
        variants = [("deep", True, 70), ("deep", False, None)]
    return [*variants, ("qwen3_tied", True, None), ("qwen3_tied", False, 70)] if layout == "tp1" else variants


def train_job(layout: str, model: str, distributed: bool, tokens: int | None) -> dict[str, Any]:
    saves = (layout, model) in SAVED
    return {
        "op": "train",
        "name": train_name(model, layout, distributed, tokens),
        "model": model,
        "layout": layout,
        "distributed": distributed,
        "tokens": tokens,
        "save_after": SAVED_AFTER if saves else None,
        "load": None,
        "count": 12,
    }


# (layout that saved, layout that loads, distributed optimizer, its tokens a micro-batch)
RESUMES = [
    ("tp2", "tp2", True, 70),
    ("tp2", "tp2", False, None),
    ("dp2", "dp2", True, 70),
    ("dp2", "dp2", False, None),
    ("tp2", "pp2", True, 70),
    ("tp2", "dp2", True, 70),
    ("dp2", "tp2", True, 70),
    ("tp2", "pp2", False, None),
    ("cp2", "pp2vpp2", True, 70),
    ("pp2vpp2", "cp2", True, 70),
]
# resumed with the changed settings of the optimizer: (layout that saved, that loads, distributed optimizer)
CHANGED = [("tp2", "tp2", True), ("tp2", "pp2", False), ("dp2", "tp2", True)]
SAVED = [("tp2", "qwen3_tied"), ("dp2", "qwen3_tied"), ("cp2", "deep"), ("pp2vpp2", "deep")]


def resumed_model(saved: str, loads: str) -> str:
    return "deep" if "pp2vpp2" in (saved, loads) else "qwen3_tied"


def resume_name(saved: str, loads: str, distributed: bool) -> str:
    return f"resume-{saved}-{loads}-{'distributed' if distributed else 'plain'}"


@operation
def train(job: Job, root: Path) -> None:
    objective = data.TRAIN_MODELS[job["model"]]
    limits = MicroBatchLimits(tokens=job["tokens"])
    trainer = trainer_of(job, root, optimizer_of(job, job["distributed"]), limits)
    if job["load"]:
        training_state.load_state(trainer, root / job["load"])
    records = []
    for step in range(data.SAVED_AFTER if job["load"] else 0, data.UPDATES):
        samples = data.train_samples(step, objective, job["count"])
        result = updated(trainer, samples, data.OBJECTIVES[objective], data.TEMPERATURE)
        records.append(record(result))
        if step == 0:
            write_arrays(
                root / f"{job['name']}-first.npz",
                {number: found["old_logprobs"] for number, found in result.columns.items()},
            )
        if step + 1 == job["save_after"]:
            save(trainer, root / f"{job['name']}.ckpt")
    saved()
    write_json(root / f"{job['name']}.json", records)
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)


@jobs
def training_jobs() -> Iterator[Job]:
    for layout in TRAIN_LAYOUTS:
        for variant in train_variants(layout):
            yield train_job(layout, *variant)
        if LAYOUTS[layout].world_size < RANKS:
            few = train_job(layout, few_model(layout), True, 70)
            yield {**few, "name": f"few-{layout}", "count": 1, "save_after": None}
        if layout in HALF_LAYOUTS:
            half = train_job(layout, "deep", True, 70)
            yield {**half, "name": f"half-{layout}", "dtype": "bf16", "save_after": None}


@jobs
def resumed_jobs() -> Iterator[Job]:
    for saves, loads, distributed, tokens in RESUMES:
        yield _resumed_job(saves, loads, distributed, tokens)
    for saves, loads, distributed in CHANGED:
        job = _resumed_job(saves, loads, distributed, 70 if distributed else None)
        yield {**job, "name": f"changed-{job['name']}", "changed": True}


def _resumed_job(saves: str, loads: str, distributed: bool, tokens: int | None) -> Job:
    model = resumed_model(saves, loads)
    return {
        **train_job(loads, model, distributed, tokens),
        "name": resume_name(saves, loads, distributed),
        "save_after": None,
        "load": f"{train_name(model, saves, distributed, tokens)}.ckpt",
    }
