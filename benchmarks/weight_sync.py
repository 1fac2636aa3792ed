"""Seconds, GB/s and memory of each process for sending the student's weights to the inference engines.

Starts the real roles (a student and engines with random weights) on Ray and sends the weights repeatedly. README.md
explains how memory is measured.

    python benchmarks/weight_sync.py [--megabytes 300] [--times 6] [--json OUT] [key=value ...]
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from models import made_models
from pipeline_run import machine
from process_memory import PeakMemory

from roll_opd.cluster.forkserver.forkserver_start import fork_server
from roll_opd.cluster.placement import Placement
from roll_opd.cluster.ray_runtime import ray_cluster
from roll_opd.config.plan import RunPlan
from roll_opd.models.model_info import read_model
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.start_roles import start_workers
from roll_opd.planner.load_plan import load_plan
from roll_opd.samples.weight_bucket import BUCKET_BYTES

APART = ("student_train.device_mapping=[0]", "student_infer.device_mapping=[1]")
SECONDS_BETWEEN_LOOKS = 0.02
STORE = "object store"
SHARED = Path("/dev/shm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--megabytes", type=float, default=300, metavar="N", help="size of the model's weights in float32"
    )
    parser.add_argument(
        "--times",
        type=int,
        default=6,
        metavar="N",
        help="number of timed transfers, and of transfers with sampled memory",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override keys of the demo's configuration")
    options = parser.parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as directory:
        models = made_models(Path(directory), options.megabytes * 1e6 / 4, 2e6)
        settings = [*APART, *models, f"output_dir={directory}", *options.overrides]
        plan = load_plan("demo", "onpolicy_distill", settings, pure=True)
        with fork_server() as server, ray_cluster(plan.devices_per_node):
            server.serve(plan)
            found = asyncio.run(measure(plan, options.times))
    print(table(found))
    if options.json:
        asked = {"megabytes": options.megabytes, "times": options.times, "overrides": options.overrides}
        text = json.dumps({**found, "settings": asked, "machine": machine()}, indent=1)
        options.json.write_text(text + "\n")
    return 0


async def measure(plan: RunPlan, times: int) -> dict[str, Any]:
    """Start the roles; return the seconds of each transfer, and the largest growth of the processes in bytes."""
    workers = await start_workers(
        replace(plan, teachers=()), Placement(plan.num_nodes, plan.devices_per_node, deterministic=plan.deterministic)
    )
    seconds, sent = [], 0.0
    resting: dict[str, int] = {}
    for version in range(1, times + 2):
        began = time.perf_counter()
        [sent] = (await workers.send_weights(version)).values()
        seconds.append(time.perf_counter() - began)
        if version == 1 + times // 10:  # caches are full
            resting, files = resident(), set(SHARED.iterdir())
    kept = {role: size - resting.get(role, 0) for role, size in resident().items()}
    left = len(set(SHARED.iterdir()) - files)
    growth: dict[str, int] = {}
    together = []
    for version in range(times + 2, 2 * times + 2):
        by_role, total = await watched(workers, version)
        together.append(total)
        growth = {role: max(size, growth.get(role, 0)) for role, size in by_role.items()}
    await workers.end()
    model = 4 * read_model(Path(plan.student.model.path)).parameters
    return {
        "model_bytes": model,
        "sent_bytes": sent,
        "bucket_bytes": BUCKET_BYTES,
        "kept_bytes": kept,  # after the timed transfers, since the first tenth of them
        "new_shared_files": left,
        "seconds": seconds[1:],  # the first transfer includes set-up
        "gigabytes_a_second": sent / median(seconds[1:]) / 1e9,
        "growth_bytes": growth,
        "together_bytes": max(together),
    }


def resident() -> dict[str, int]:
    """Return the resident memory of the processes of each role in bytes."""
    memory, found = PeakMemory(), Counter[str]()
    memory.look(os.getpid())
    for pid, role in memory.roles().items():
        found[role] += kilobytes(f"/proc/{pid}/status", "VmRSS:")
    return dict(found)


async def watched(workers: RunWorkers, version: int) -> tuple[dict[str, int], int]:
    """Send weights once; return the largest growth of a process of each role, and of all processes together."""
    memory = PeakMemory()
    memory.look(os.getpid())
    processes = memory.roles() | {pid: STORE for pid, seen in memory.seen.items() if "raylet" in seen.title[:200]}
    before = {pid: reset_peak(pid) for pid in processes}
    resting = sum(map(proportional, processes))
    most, is_over = [resting], threading.Event()

    def look() -> None:
        while not is_over.wait(SECONDS_BETWEEN_LOOKS):
            most[0] = max(most[0], sum(map(proportional, processes)))

    watcher = threading.Thread(target=look)
    watcher.start()
    await workers.send_weights(version)
    is_over.set()
    watcher.join()
    growth: dict[str, int] = {}
    for pid, role in processes.items():
        growth[role] = max(growth.get(role, 0), kilobytes(f"/proc/{pid}/status", "VmHWM:") - before[pid])
    return growth, most[0] - resting


def reset_peak(pid: int) -> int:
    """Reset the kernel's high-water mark of a process; return its current memory in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return kilobytes(f"/proc/{pid}/status", "VmRSS:")


def proportional(pid: int) -> int:
    """Return the proportional memory of a process in bytes: summed over processes, each shared page counts once."""
    return kilobytes(f"/proc/{pid}/smaps_rollup", "Pss:")


def kilobytes(path: str, name: str) -> int:
    """Return the bytes of the line that begins with `name`."""
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def table(found: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    mib = {role: f"{size / 2**20:.0f}" for role, size in found["growth_bytes"].items()}
    kept = found["kept_bytes"]
    bound = (2 * found["bucket_bytes"] + found["model_bytes"]) / 2**20
    return (
        f"model of {found['model_bytes'] / 1e6:.0f} MB, {found['sent_bytes'] / 1e6:.2f} MB sent,"
        f" buckets of {found['bucket_bytes'] / 2**20:.0f} MiB\n"
        f"seconds: median {median(found['seconds']):.3f}, {min(found['seconds']):.3f} to {max(found['seconds']):.3f}\n"
        f"{found['gigabytes_a_second']:.2f} GB/s\n"
        f"memory kept in MiB, by role: {', '.join(f'{role} {size / 2**20:.1f}' for role, size in kept.items())};"
        f" new files in {SHARED}: {found['new_shared_files']}\n"
        f"growth in MiB at the most, by process: {', '.join(f'{role} {size}' for role, size in mib.items())}\n"
        f"growth of all together: {found['together_bytes'] / 2**20:.0f} MiB; two buckets and the model are {bound:.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
