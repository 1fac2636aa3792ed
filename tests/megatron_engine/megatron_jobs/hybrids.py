"""Models with Gated DeltaNet layers: scored, exported, trained."""

from collections.abc import Iterator

from megatron_layouts import HYBRID_MODELS
from megatron_ranks import Job
from megatron_registry import jobs

EXPERT_LAYOUTS = ("ep2", "tp2ep2", "cp2ep2", "pp2ep2")
LAYOUTS = ("tp1", "tp2sp", "pp2", "cp2", "tp2spcp2", "pp2vpp2", "dp2")
GRID = [(model, layout) for model in HYBRID_MODELS for layout in LAYOUTS]
GRID += [(model, layout) for model in HYBRID_MODELS if model != "qwen3_5" for layout in EXPERT_LAYOUTS]
GRID += [("qwen3_5", "tp2")]  # without sequence parallelism, which experts need
MULTIMODAL = [("qwen3_5", "tp2"), ("qwen3_5", "pp2"), ("qwen3_5_moe", "tp2ep2"), ("qwen3_5_moe", "pp2ep2")]
SAVED = [("qwen3_5", "tp2sp"), ("qwen3_next", "tp2ep2")]  # and loaded on one rank
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@jobs
def hybrid_jobs() -> Iterator[Job]:
    for model, layout in GRID:
        yield {
            "op": "experts",
            "name": f"hybrid-{model}-{layout}",
            "model": model,
            "layout": layout,
            "save": (model, layout) in SAVED,
            "load": None,
            "megatron_args": RECOMPUTED if layout == "pp2" else {},
        }
    for model, saved in SAVED:
        yield {
            "op": "experts",
            "name": f"hybrid-resume-{model}",
            "model": model,
            "layout": "tp1",
            "save": False,
            "load": f"hybrid-{model}-{saved}.ckpt",
            "megatron_args": {},
        }
    for model, layout in MULTIMODAL:
        yield {
            "op": "frozen",
            "name": f"hybrid-multimodal-{model}-{layout}",
            "model": f"{model}_multimodal",
            "layout": layout,
            "deterministic": True,
        }
