"""Models with layers of multi-token prediction after the last one: exported, trained, with merged adapters."""

from collections.abc import Iterator

from megatron_jobs.lora import LORA_TARGETS
from megatron_ranks import Job
from megatron_registry import jobs

TRAINED = [("deepseek_v3_mtp", "tp1"), ("glm4_moe_mtp", "pp2"), ("deepseek_v3_mtp", "tp2ep2")]
MERGED = ("deep_mtp", "tp1")


@jobs
def kept_jobs() -> Iterator[Job]:
    for model, layout in TRAINED:
        yield {
            "op": "experts",
            "name": f"kept-{model}-{layout}",
            "model": model,
            "layout": layout,
            "save": False,
            "load": None,
            "megatron_args": {},
        }
    model, layout = MERGED
    yield {
        "op": "lora",
        "name": f"kept-{model}-{layout}",
        "layout": layout,
        "model": model,
        "targets": LORA_TARGETS["all"],
        "load": None,
        "save": False,
    }
