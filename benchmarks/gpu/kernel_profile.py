"""Profile of one update and one scoring pass: time by kernel family, idle time of the device, host time, memory.

    python benchmarks/gpu/kernel_profile.py [--shape 1.7B] [--pack 8192] [--passes train teacher] [--json OUT]
        [--without NAME[+NAME] ...] [--timed] [--traces DIRECTORY]
    python benchmarks/gpu/kernel_profile.py --shape tiny --device cpu          # the same code, in seconds, on a CPU

The second time in a row of the table is predicted from FLOPs and bytes for an H100 (`predicted.py`).
The file is not named `profile.py`, because cProfile, which torch imports, would import it instead of Python's module.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from fast_paths import PATHS, without  # noqa: E402
from shapes import SHAPES, make_model  # noqa: E402

ROUNDS, COMPARED = 3, 2  # timed rounds of a pass, and of its variants; one more round before them is not timed
COMPARABLE = ("mean_logprob", "loss", "grad_norm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile the passes, print a table for each, and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7B")
    parser.add_argument("--pack", type=int, help="tokens of a micro-batch (default: set by the shape)")
    parser.add_argument("--sequences", type=int, help="sequences of an update (default: set by the shape)")
    parser.add_argument("--passes", nargs="+", choices=("train", "teacher"), default=["train", "teacher"])
    parser.add_argument(
        "--without", nargs="*", default=[], help="also time without these fast paths (NAME+NAME, all; `fast_paths.py`)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--model", type=Path, help="a directory with a model of this shape in student/")
    parser.add_argument("--timed", action="store_true", help="measure only times, without the profiler")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--traces", type=Path, help="directory for a Chrome trace of each pass")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or Path(directory)
        if not (model / "student").exists():
            make_model(model / "student", SHAPES[options.shape], 1, options.device)
        found = profiled(options, model)
    for name, one in found["passes"].items():
        print("\n".join(table(f"{options.shape} {name}", one)), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def profiled(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Return the figures of every pass."""
    import engine

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    changes = {"pack": options.pack, "sequences": options.sequences}
    shape = replace(SHAPES[options.shape], **{name: value for name, value in changes.items() if value})
    found: dict[str, Any] = {"device": engine.device_name(), "shape": options.shape, "pack": shape.pack, "passes": {}}
    for name in options.passes:
        print(f"{options.shape} {name} ...", file=sys.stderr, flush=True)
        with engine.running(partial(made, name, model, options, shape)) as rank:
            found["passes"][name] = of_pass(name, rank, options, model, shape)
    return found


def of_pass(name: str, rank: Any, options: argparse.Namespace, model: Path, shape: Any) -> dict[str, Any]:
    """Return the speed of a pass, with and without its fast paths, and its time by part."""
    from predicted import predicted

    call, tokens, passes = workload(name, rank, shape)
    timed = partial(speed, call, model, tokens, passes)
    call()
    found = timed(ROUNDS)
    if not options.timed:
        found |= traced(rank, call, options.traces / f"{name}.json.gz" if options.traces else None)
    found["without"] = {}
    for left_out in options.without:
        with without(list(PATHS) if left_out == "all" else left_out.split("+"), rank):
            found["without"][left_out] = timed(COMPARED)
    lengths = [len(one) for one in tokens]
    packs = -(-sum(lengths) // shape.pack)
    found["predicted"] = predicted(shape, lengths, sum(lengths), packs, learns=passes > 1)
    return found


def speed(call: Callable[[], dict[str, float]], model: Path, tokens: Any, passes: int, rounds: int) -> dict[str, Any]:
    """Return seconds, rates and memory of a call, and its last result."""
    import engine

    engine.reset_peak()
    said: list[dict[str, float]] = []
    seconds = engine.timed(lambda: said.append(call()), rounds)
    return engine.speed(model, tokens, seconds, passes) | {"peak_bytes": engine.peak_bytes()} | said[-1]


def made(name: str, model: Path, options: argparse.Namespace, shape: Any) -> Any:
    """Return the engine of a pass."""
    import engine

    from roll_opd.megatron.engine import MegatronEngine
    from roll_opd.megatron.student_engine import MegatronTrainer

    kind = MegatronTrainer if name == "train" else MegatronEngine
    # with a learning rate of 0, every update has the same weights
    return kind(engine.plan(model, options.dtype, shape, learning_rate=0.0), seed=0, deterministic=False)


def workload(name: str, rank: Any, shape: Any) -> tuple[Callable[[], dict[str, float]], Any, int]:
    """Return (a call of the pass that returns figures, its sequences, its FLOPs relative to a forward pass)."""
    import numpy as np
    from batches import PROMPT, samples, sequences

    from roll_opd.config.plan import ObjectivePlan
    from roll_opd.models.flops import TRAINED

    tokens = sequences(shape.vocab, shape.sequences, shape.length)
    if name == "teacher":
        asked = [(one, PROMPT) for one in tokens]

        def scored() -> dict[str, float]:
            return {"mean_logprob": float(np.concatenate(list(rank.compute_logprobs(asked, 1.0).values())).mean())}

        return scored, tokens, 1
    fixed = {f"teacher {number}": np.zeros(len(one) - PROMPT, np.float32) for number, one in enumerate(tokens)}
    batch = samples(tokens, fixed, "sampled")

    def updated() -> dict[str, float]:
        done = rank.update(batch, ObjectivePlan(), 1.0)
        return {"loss": float(done.sums["weighted_loss"]), "grad_norm": done.grad_norm}

    return updated, tokens, TRAINED


def traced(rank: Any, call: Callable[[], object], trace: Path | None) -> dict[str, Any]:
    """Return the time and the memory of one call by part."""
    import torch
    from events import figures
    from parts import named_parts
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with named_parts(rank), profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        began = time.perf_counter()
        call()
        returned = time.perf_counter() - began
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    return figures(profiler.profiler.kineto_results.events()) | {"host_seconds": returned}


def table(title: str, found: dict[str, Any]) -> list[str]:
    """Return the lines of a pass."""
    rate = f"{found['flops_a_second'] / 1e12:.4g} TFLOP/s, {found['tokens_a_second']:.0f} tokens/s"
    lines = [f"{title}: {found['seconds']:.4f} s, {rate}, peak {(found['peak_bytes'] or 0) / 1e9:.1f} GB"]
    for left_out, one in found["without"].items():
        same = ", ".join(f"{name} {one[name]:.7g} ({found[name]:.7g})" for name in COMPARABLE if name in one)
        lines.append(f"  without {left_out}: {one['seconds']:.4f} s, {same}")
    if "families" not in found:
        return lines
    whole = found["span_seconds"]
    lines.append(f"  profiled {whole:.4f} s, device busy {100 * found['busy_seconds'] / whole:.1f} %")
    lines.append("    share          time predicted kernels  family")
    for name, one in sorted(found["families"].items(), key=lambda item: -item[1]["seconds"]):
        times = f"{1e3 * one['seconds']:9.2f} ms {1e3 * found['predicted'].get(name, 0.0):9.2f}"
        lines.append(f"  {100 * one['seconds'] / whole:5.1f} % {times} {one['kernels']:7d}  {name}")
    gaps, host = found["gaps"], found["host"]
    long = f"{gaps['long']} gaps above 20 us with {1e3 * gaps['long_seconds']:.1f} ms"
    lines.append(f"  idle {1e3 * gaps['seconds']:.1f} ms, {long}")
    lines.append(f"  host: {host['launches']} launches, {host['waits']} waits of {1e3 * host['wait_seconds']:.1f} ms")
    return lines


if __name__ == "__main__":
    sys.exit(main())
