"""Time of the training engine for numbers of tokens and lengths, and memory of a rank for layouts.

Every point is a set of real ranks (torchrun, gloo on a CPU) that run updates and compute log-probs of random sequences
with a model made for the measurement. README.md explains it.

    python benchmarks/layouts.py [--axis tokens length layout] [--parameters 20e6] [--rounds 5] [--threads 2]
        [--json OUT] [--plot OUT.svg]
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loglog import Panel, drawn
from models import make_model

AXES = ("tokens", "length", "layout")
LENGTH, PACK = 256, 2048  # tokens of a sequence and of a micro-batch, on axes along which these are constant
SEQUENCES = (8, 16, 32, 64)  # per update, along `tokens`
LENGTHS = (128, 256, 512, 1024, 2048)  # along `length`
STEP_TOKENS = 4096  # tokens of an update, along `length` and `layout`
KINDS = {"tensor": "tp", "pipeline": "pp", "context": "cp", "data": "dp"}
RANKS = (1, 2, 4)
MIB = 2**20


Batch = tuple[int, int]  # sequences, tokens of each


@dataclass(frozen=True)
class Ranks:
    """A set of processes: the layout of the model over them, and the batches that they process alternately."""

    model: str
    layout: Mapping[str, int]  # tp, pp, cp, dp
    batches: Sequence[Batch]
    rounds: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the requested axes, print their tables, and draw all axes in the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", nargs="*", choices=AXES, default=AXES)
    parser.add_argument("--parameters", type=float, default=8e6)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; the median counts")
    parser.add_argument("--threads", type=int, default=2, help="threads of the single rank, along tokens and length")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # for a process that measures
    options = parser.parse_args(arguments)
    if options.rank_of:
        measure(Ranks(**json.loads(Path(options.rank_of).read_text())), Path(options.rank_of).parent)
        return 0
    found = json.loads(options.json.read_text()) if options.json and options.json.is_file() else {}
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_model(Path(directory) / "model", options.parameters, seed=1))
        found |= {"parameters": options.parameters, "rounds": options.rounds, "cores": len(os.sched_getaffinity(0))}
        for axis in options.axis:
            sets = [Ranks(model, layout, batches, options.rounds) for layout, batches in sets_of(axis)]
            found[axis] = [point for ranks in sets for point in figures_of(ranks, Path(directory), options.threads)]
            print("\n".join(TABLES[axis](found[axis])), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(drawn(panels(found), columns=2))
    return 0


def sets_of(axis: str) -> list[tuple[dict[str, int], list[Batch]]]:
    """Return the points of an axis: layouts, each with its batches."""
    alone = dict.fromkeys(KINDS.values(), 1)
    if axis == "tokens":
        return [(alone, [(number, LENGTH) for number in SEQUENCES])]
    if axis == "length":
        return [(alone, [(STEP_TOKENS // length, length) for length in LENGTHS])]
    spread = [alone, *(alone | {kind: ranks} for kind in KINDS.values() for ranks in RANKS[1:])]
    return [(layout, [(STEP_TOKENS // LENGTH, LENGTH)]) for layout in spread]


def figures_of(ranks: Ranks, directory: Path, threads: int) -> list[dict[str, Any]]:
    """Run one set of processes; return, for each batch, the largest of the ranks' figures."""
    spec, count = directory / "ranks.json", math.prod(ranks.layout.values())
    spec.write_text(json.dumps(asdict(ranks)))
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads if count == 1 else 1)}
    print(f"{ranks.layout}: {ranks.batches} ...", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, *command, f"--rank-of={spec}"], check=True, env=environment, capture_output=True)
    of_ranks = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(count)]
    return [
        {"layout": ranks.layout, "sequences": sequences, "length": length}
        | {name: max(figures[number][name] for figures in of_ranks) for name in of_ranks[0][number]}
        for number, (sequences, length) in enumerate(ranks.batches)
    ]


def measure(ranks: Ranks, directory: Path) -> None:
    """Measure on this rank, and write the figures of each batch."""
    import torch

    from roll_opd.config.plan import Layout, MicroBatchLimits, ModelPlan, ObjectivePlan, OptimizerPlan, TrainPlan
    from roll_opd.megatron.student_engine import MegatronTrainer
    from roll_opd.models.memory import shard_of, train_memory
    from roll_opd.models.model_info import read_model

    limits, layout = MicroBatchLimits(tokens=PACK), Layout(**dict[str, Any](ranks.layout))
    plan = TrainPlan(
        "student",
        ModelPlan(ranks.model),
        tuple(range(layout.world_size)),
        layout,
        limits,
        train_limits=limits,
        mini_batch_sequences=max(sequences for sequences, _ in ranks.batches),
        optimizer=OptimizerPlan(learning_rate=1e-6),
    )
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    trainer = MegatronTrainer(plan, seed=0, deterministic=False)
    watch = AttentionWatch(trainer.chunks)
    seconds: list[dict[str, list[float]]] = [{"update": [], "logprobs": [], "attention": []} for _ in ranks.batches]
    for turn in range(ranks.rounds + 1):
        for batch, times in zip(ranks.batches, seconds, strict=True):
            samples = random_samples(*batch)
            began = time.perf_counter()
            trainer.update(samples, ObjectivePlan(), 1.0)
            trained = time.perf_counter()
            with watch:
                trainer.compute_logprobs([(sample.tokens, 1) for sample in samples], 1.0)
            ended = time.perf_counter()
            if turn:  # the first update creates the optimizer's state
                for name, value in zip(times, (trained - began, ended - trained, watch.seconds), strict=True):
                    times[name].append(value)
    rank = torch.distributed.get_rank()
    planned = train_memory(
        shard_of(read_model(Path(ranks.model)), plan), plan, LENGTH, rank * layout.pp // len(plan.devices)
    )
    memory = {"peak_bytes": resident("VmHWM") - before, "planned_bytes": sum(planned.values())}
    figures = [{name: median(values) for name, values in times.items()} | memory for times in seconds]
    (directory / f"rank-{rank}.json").write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


def random_samples(sequences: int, length: int) -> list[Any]:
    """Return samples of random tokens with random advantages."""
    import numpy as np

    from roll_opd.samples.sample import Sample

    rng = np.random.default_rng(0)
    zeros = np.zeros(length - 1, np.float32)
    fixed = {
        "mask": np.ones(length - 1, bool),
        "weight": np.full(length - 1, 1 / (sequences * (length - 1)), np.float32),
        "opd_coefficients": zeros,
        "opd_teacher": zeros,
    }

    def advantages() -> np.ndarray:
        return rng.normal(size=length - 1).astype(np.float32)

    return [Sample(rng.integers(0, 300, length), 1, {**fixed, "advantages": advantages()}) for _ in range(sequences)]


class AttentionWatch:
    """Seconds of the attention core in the forward passes inside the context."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._is_on, self.seconds, self._began = False, 0.0, 0.0
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if name.endswith("core_attention"):
                    module.register_forward_pre_hook(self._begin)
                    module.register_forward_hook(self._end)

    def __enter__(self) -> None:
        self._is_on, self.seconds = True, 0.0

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def _begin(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds += (time.perf_counter() - self._began) * self._is_on


def resident(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def tokens_table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return time by number of tokens, at one length: the time per token should be constant."""
    lines = [f"{'tokens':>8} {'update s':>9} {'log-probs s':>12} {'update us a token':>18} {'of the first':>13}"]
    each = [point["update"] / (point["sequences"] * point["length"]) for point in points]
    for point, cost in zip(points, each, strict=True):
        tokens = point["sequences"] * point["length"]
        times = f"{point['update']:>9.3f} {point['logprobs']:>12.3f}"
        lines.append(f"{tokens:>8} {times} {1e6 * cost:>18.1f} {cost / each[0]:>13.3f}")
    return lines


def length_table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return time by length, at one number of tokens: the time without attention should be constant."""
    lines = [
        f"{'length':>8} {'update s':>9} {'log-probs s':>12} {'attention s':>12} {'the rest':>9} {'of the first':>13}"
    ]
    rest = [point["logprobs"] - point["attention"] for point in points]
    for point, other in zip(points, rest, strict=True):
        times = f"{point['update']:>9.3f} {point['logprobs']:>12.3f} {point['attention']:>12.3f}"
        lines.append(f"{point['length']:>8} {times} {other:>9.3f} {other / rest[0]:>13.3f}")
    return lines


def layout_table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return measured and planned memory of the rank with the most memory, and time, by layout."""
    lines = [f"{'layout':>8} {'peak MiB':>9} {'of one rank':>12} {'planned MiB':>12} {'update s':>9}"]
    for point in points:
        name = next((f"{kind}{size}" for kind, size in point["layout"].items() if size > 1), "one")
        peak, planned = point["peak_bytes"] / MIB, point["planned_bytes"] / MIB
        share = point["peak_bytes"] / points[0]["peak_bytes"]
        lines.append(f"{name:>8} {peak:>9.0f} {share:>12.2f} {planned:>12.0f} {point['update']:>9.3f}")
    return lines


TABLES = {"tokens": tokens_table, "length": length_table, "layout": layout_table}


def panels(found: Mapping[str, Any]) -> list[Panel]:
    """Return the panels of the measured axes."""
    drawings = []
    if "tokens" in found:
        points = found["tokens"]
        x = [point["sequences"] / points[0]["sequences"] for point in points]
        lines = {name: [point[name] for point in points] for name in ("update", "logprobs")}
        drawings.append(Panel("Seconds against tokens, length 256", x, lines))
    if "length" in found:
        points = found["length"]
        x = [point["length"] for point in points]
        lines = {name: [point[name] for point in points] for name in ("update", "logprobs", "attention")}
        lines["log-probs, the rest"] = [point["logprobs"] - point["attention"] for point in points]
        drawings.append(Panel("Seconds against length, 4,096 tokens", x, lines))
    if "layout" in found:
        points = found["layout"]
        for title, name, unit in (("MiB of the fullest rank", "peak_bytes", MIB), ("Seconds an update", "update", 1)):
            lines = {
                kind: [point[name] / unit for point in points if point is points[0] or point["layout"][short] > 1]
                for kind, short in KINDS.items()
            }
            drawings.append(Panel(f"{title}, against ranks", RANKS, lines))
    return drawings


if __name__ == "__main__":
    sys.exit(main())
