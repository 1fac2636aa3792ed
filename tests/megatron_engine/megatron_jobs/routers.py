"""Losses of routers, each separately."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import megatron_data as data
import megatron_layouts as layouts
import numpy as np
import torch
import torch.distributed as dist
from megatron_ranks import STILL, Job, gradient, meet_anew, write_results
from megatron_registry import jobs, operation
from megatron_samples import updated

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import MicroBatchLimits, ModelPlan, ObjectivePlan, TrainPlan
from roll_opd.megatron import parallel
from roll_opd.megatron.student_engine import MegatronTrainer

ROUTER_COEFFICIENTS = {
    "z_loss": {"moe_z_loss_coeff": 0.05},
    "load_balancing_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
}
# layout -> (losses of routers, tokens a micro-batch): the balancing loss is one of micro-batches
ROUTER_LAYOUTS = {
    "tp1": (("z_loss", "load_balancing_loss"), None),
    "ep2": (("z_loss", "load_balancing_loss"), 70),
    "tp2ep2": (("z_loss", "load_balancing_loss"), None),
    "cp2ep2": (("z_loss", "load_balancing_loss"), None),
    "pp2ep2": (("z_loss",), 70),
}


@operation
def routers(job: Job, root: Path) -> None:
    """Compute the routers' losses and their gradients, each separately: no other term has a gradient."""
    losses, tokens = ROUTER_LAYOUTS[job["layout"]]
    found: dict[str, np.ndarray] = {}
    for number, name in enumerate(losses):
        if number:
            parallel.shutdown()
            meet_anew(root / f"port-{job['name']}-{name}")
        layout = layouts.LAYOUTS[job["layout"]]
        plan = TrainPlan(
            "train",
            ModelPlan(layouts.model_path(root, layouts.EXPERT_MODELS[0])),
            tuple(range(layout.world_size)),
            layout,
            MicroBatchLimits(),
            megatron_args=FrozenDict(ROUTER_COEFFICIENTS[name]),
            train_limits=MicroBatchLimits(tokens=tokens),
            optimizer=STILL,
        )
        trainer = MegatronTrainer(plan, seed=0)
        samples = [
            replace(
                s, opd_coefficients=0 * s.opd_coefficients, opd_teacher=0 * s.opd_teacher, advantages=0 * s.advantages
            )
            for s in data.train_samples(3, "opd")
        ]
        updated(trainer, samples, ObjectivePlan(), data.TEMPERATURE)
        found[f"{name}-gradient"] = gradient(trainer)
        value = trainer.router_losses.values.get(name, torch.zeros(()))
        dist.all_reduce(value)
        found[name] = value.numpy()
    write_results(root / f"{job['name']}.npz", found)


@jobs
def routers_jobs() -> Iterator[Job]:
    for layout in ROUTER_LAYOUTS:
        yield {"op": "routers", "name": f"routers-{layout}", "layout": layout}
