"""Memory of a rank while a model is loaded."""

import ctypes
import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import megatron_layouts as layouts
import torch.distributed as dist
from megatron_ranks import Job
from megatron_registry import jobs, operation

from roll_opd.config.plan import MegatronPlan, MicroBatchLimits, ModelPlan
from roll_opd.megatron import parallel
from roll_opd.megatron.model_builder import build_model

LOADED = [("large", "tp2"), ("large", "pp2"), ("large_moe", "ep2")]  # (model, layout)
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


@operation
def loading(job: Job, root: Path) -> None:
    """Write the largest growth of this rank's memory while a model is loaded, and the memory of the model.

    Only anonymous memory counts. Freed memory is returned to the system before the loading, so that all new memory is
    visible. Memory freed during the loading is returned immediately, so that only used memory counts.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 2**20)
    layout = layouts.LAYOUTS[job["layout"]]
    plan = MegatronPlan(
        "loaded",
        ModelPlan(layouts.model_path(root, job["model"])),
        tuple(range(layout.world_size)),
        layout,
        MicroBatchLimits(),
    )
    parallel.initialize(layout, 0)
    gc.collect()
    libc.malloc_trim(0)
    before, sizes, ended = own_memory(), [], threading.Event()

    def watch() -> None:
        while not ended.wait(0.0005):
            sizes.append(own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    built = build_model(plan, seed=0, trainable=False, exact=True)
    ended.set()
    watcher.join()
    sizes.append(own_memory())  # a busy machine may not have let the watcher look at the end
    share = sum(p.numel() * p.element_size() for chunk in built.chunks for p in chunk.parameters())
    (root / f"{job['name']}-{dist.get_rank()}.json").write_text(json.dumps([max(sizes) - before, share]))


def own_memory() -> int:
    """Return the bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@jobs
def loading_jobs() -> Iterator[Job]:
    for model, layout in LOADED:
        yield {"op": "loading", "name": f"loading-{model}-{layout}", "model": model, "layout": layout}
