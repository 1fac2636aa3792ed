"""Options of Megatron that change neither loss nor gradient."""

from collections.abc import Iterator
from pathlib import Path

import megatron_data as data
import numpy as np
from megatron_ranks import STILL, Job, gradient, record, trainer_of, write_results
from megatron_registry import jobs, operation
from megatron_samples import updated

from roll_opd.config.plan import MicroBatchLimits, ObjectivePlan

COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = ("core_attn", "mlp", "moe", "shared_experts", "layernorm")
# name -> (model, layout, options of Megatron's that change neither loss nor gradient)
OPTIONS = {
    "none": ("deep", "tp1", {}),
    "none_experts": ("qwen2_moe", "tp1", {}),
    "uniform": ("qwen2_moe", "tp1", FULL),
    "block": ("deep", "tp1", FULL | {"recompute_method": "block", "recompute_num_layers": 3}),
    "selective": ("deep", "tp1", {"recompute_granularity": "selective", "recompute_modules": SELECTIVE[:2]}),
    "selective_experts": ("qwen2_moe", "ep2", {"recompute_granularity": "selective", "recompute_modules": SELECTIVE}),
    "layers_with_experts": ("qwen2_moe", "tp1", {"moe_layer_recompute": True}),
    "overlap": ("qwen2_moe", "ep2", {"moe_shared_expert_overlap": True}),
    "routers": ("qwen2_moe", "tp1", {"moe_router_dtype": "fp64"}),
    "first": ("deep", "pp2", {"num_layers_in_first_pipeline_stage": 1}),
    "last": ("qwen2_moe", "pp2", {"num_layers_in_last_pipeline_stage": 3}),
    "counted": ("deep", "pp2", dict.fromkeys(COUNTED, True)),
    "written": ("deep", "pp2", {"pipeline_model_parallel_layout": "Et|tttL"}),
    "kernels": ("deep", "tp1", {"bias_activation_fusion": True, "apply_rope_fusion": True}),
}


@operation
def options(job: Job, root: Path) -> None:
    """Compute loss and gradient of an update with options of Megatron."""
    _, _, args = OPTIONS[job["option"]]
    trainer = trainer_of({**job, "megatron_args": args}, root, STILL, MicroBatchLimits(tokens=70))
    result = record(updated(trainer, data.train_samples(3, "opd"), ObjectivePlan(), 1.0))
    write_results(
        root / f"{job['name']}.npz", {"loss": np.array(result["weighted_loss"]), "gradient": gradient(trainer)}
    )


@jobs
def options_jobs() -> Iterator[Job]:
    for name, (model, layout, _) in OPTIONS.items():
        yield {"op": "options", "name": f"options-{name}", "option": name, "model": model, "layout": layout}
