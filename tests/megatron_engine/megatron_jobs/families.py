"""Model families beyond Llama's: scored, exported, trained."""

from collections.abc import Iterator

from megatron_layouts import EXPERT_FAMILY_MODELS, FAMILY_MODELS
from megatron_ranks import Job
from megatron_registry import jobs

LAYOUTS = ("tp1", "tp2", "tp2sp", "pp2", "cp2", "tp2spcp2", "pp2vpp2", "pp2dp2")
EXPERT_LAYOUTS = ("tp1", "tp2etp1", "pp2", "cp2", "ep2", "tp2ep2", "tp2cp2ep2", "pp2vpp2ep2")
PLAIN = [(model, layout) for model in FAMILY_MODELS for layout in LAYOUTS]
SCORED = PLAIN + [(model, layout) for model in EXPERT_FAMILY_MODELS for layout in EXPERT_LAYOUTS]
TRAINED = [(model, layout) for model in FAMILY_MODELS for layout in ("tp2sp", "pp2cp2", "tp2")]
TRAINED += [(model, layout) for model in EXPERT_FAMILY_MODELS for layout in ("tp2ep2", "pp2cp2", "cp2ep2", "tp2etp1")]
SAVED = [("gpt_oss", "tp2ep2")]  # and loaded on one rank


@jobs
def family_jobs() -> Iterator[Job]:
    for model, layout in SCORED:
        yield {
            "op": "frozen",
            "name": f"family-{model}-{layout}",
            "model": model,
            "layout": layout,
            "deterministic": True,
        }
    for model, layout in TRAINED:
        args = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        recomputed = args if layout == "pp2cp2" else {}
        yield {
            "op": "experts",
            "name": f"family-trained-{model}-{layout}",
            "model": model,
            "layout": layout,
            "save": (model, layout) in SAVED,
            "load": None,
            "megatron_args": recomputed,
        }
    for model, layout in SAVED:
        yield {
            "op": "experts",
            "name": f"family-resumed-{model}",
            "model": model,
            "layout": "tp1",
            "save": False,
            "load": f"family-trained-{model}-{layout}.ckpt",
            "megatron_args": {},
        }
