"""Threads that watch the connections of process groups."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import megatron_layouts as layouts
import torch.distributed as dist
from megatron_ranks import Job, meet_anew
from megatron_registry import jobs, operation

from roll_opd.megatron import parallel


@operation
def priorities(job: Job, root: Path) -> None:
    """Write the priorities of the threads that watch the connections of process groups, after several groups were
    made."""
    for number in range(3):
        parallel.initialize(layouts.LAYOUTS[job["layout"]], seed=0)
        dist.barrier()
        parallel.shutdown()
        meet_anew(root / f"port-{job['name']}-{number}")
    parallel.initialize(layouts.LAYOUTS[job["layout"]], seed=0)
    (root / f"{job['name']}-{dist.get_rank()}.json").write_text(json.dumps(priorities_of_connections()))
    dist.barrier()


def priorities_of_connections() -> list[int]:
    """Return the priorities of this process's threads that watch connections of gloo groups."""
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    names = {thread: Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in threads}
    return [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads if names[thread] == "gloo_tcp_loop"]


@jobs
def connections_jobs() -> Iterator[Job]:
    yield {"op": "priorities", "name": "priorities", "layout": "tp4"}
