"""Shares of the machine's matrix rate and memory bandwidth that each phase of a step reaches.

Runs the real pipeline, counts the minimum of computation and memory traffic of each phase (`work.py`), measures the
rates of the phase's devices (`machine_rates.py`), and divides. README.md explains the table.

    python benchmarks/limits.py [key=value ...] [--cases configured larger] [--steps N] [--warmup N] [--student 20e6]
        [--teacher 80e6] [--config_path DIR] [--config_name NAME] [--json OUT]
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from machine_rates import rates
from models import made_models
from pipeline_run import ONLY_STEPS, ShownLog, machine, pipeline_row, run_pipeline
from work import UncountedError, Work, check_counted, phase_devices, phase_work

from roll_opd.base.failures import ConfigError
from roll_opd.config.plan import RunPlan
from roll_opd.planner.load_plan import load_plan

# overrides of the demo, for larger models: 64 sequences of up to 75 tokens per step
LARGER = (
    "rollout_batch_size=16",
    "response_length=64",
    "student_train.training_args.per_device_train_batch_size=32",  # one update on two devices
    "student_train.training_args.gradient_accumulation_steps=1",
)
CASES = ("configured", "larger")
OVERLAPPING = ("generate", "teacher")
Rates = Mapping[str, Mapping[str, float]]  # phase -> flops and bytes per second of its devices


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every case and print its table."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raise an exception, so that started processes are ended
    results: dict[str, Any] = {}
    for case in options.cases:
        print(f"{case} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="limits-") as directory:
            try:
                results[case] = measure(case, options, Path(directory))
            except (ConfigError, UncountedError) as error:
                sys.exit(f"{case}: {error}")
        print(table(results[case]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        settings = {**vars(options), "json": None}
        text = json.dumps({"cases": results, "settings": settings, "machine": machine()}, indent=1)
        options.json.write_text(text + "\n")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line; exit code 2 if no step is left to measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="`larger` uses models with random weights"
    )
    parser.add_argument("--config_path", default="demo", metavar="DIR")
    parser.add_argument("--config_name", default="onpolicy_distill", metavar="NAME")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="warm-up included")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="first steps, not counted")
    parser.add_argument(
        "--student", type=float, default=20e6, metavar="N", help="parameters of the student, in the case `larger`"
    )
    parser.add_argument("--teacher", type=float, default=80e6, metavar="N")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override keys of the configuration")
    options = parser.parse_intermixed_args(arguments)
    if options.warmup < 0 or options.steps <= options.warmup:
        parser.error("--steps must be more than --warmup")
    return options


def measure(case: str, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run one case; rates are measured before and after, and the better rates count."""
    own = [*LARGER, *made_models(directory, options.student, options.teacher)] if case == "larger" else []
    overrides = [*own, f"max_steps={options.steps}", *options.overrides]
    settings = (*ONLY_STEPS, f"output_dir={directory}", *overrides)
    plan = load_plan(options.config_path, options.config_name, settings, pure=True)
    check_counted(plan)
    before = best_rates(plan)
    shown = ShownLog(directory / "log", lambda line: print(f"  {line}", flush=True))
    names = options.config_path, options.config_name
    rows = run_pipeline(*names, overrides, directory, lambda _: shown.look())[options.warmup :]
    after = best_rates(plan)
    best = {name: {kind: max(rate[kind], after[name][kind]) for kind in rate} for name, rate in before.items()}
    return compare(plan, rows, best)


def best_rates(plan: RunPlan) -> dict[str, dict[str, float]]:
    """Return the best rates of each phase's devices: on CPUs of all threads together, on GPUs of one GPU times their
    number."""
    measured: dict[tuple[int, str], dict[str, float]] = {}
    found = {}
    for name, (devices, dtype) in phase_devices(plan).items():
        key = len(devices), dtype
        if key not in measured:
            threads = len(devices) * max(1, machine()["cores"] // plan.devices_per_node)
            one = rates(threads, dtype)
            times = len(devices) if one["on_gpu"] else 1
            measured[key] = {kind: times * one[kind] for kind in ("flops", "bytes")}
        found[name] = measured[key]
    return found


def compare(plan: RunPlan, rows: Sequence[Mapping[str, float]], best: Rates) -> dict[str, Any]:
    """Return medians over steps of each phase's seconds, its work and its shares of the best rates.

    `least_seconds` is the larger of the times for computation and memory traffic at the best rates. For several phases
    it is their sum, or the longest of them if they overlap and share no device.
    """
    seconds = [pipeline_row(dict(row)) for row in rows]
    works = [phase_work(plan, row) for row in rows]
    phases: dict[str, dict[str, Any]] = {}
    for name in works[0]:
        work = Work(median(one[name].flops for one in works), median(one[name].bytes for one in works))
        least = max(work.flops / best[name]["flops"], work.bytes / best[name]["bytes"])
        phases[name] = _shares(median(row[name] for row in seconds), least, work, best[name])
    devices = phase_devices(plan)
    apart = not devices["generate"][0] & devices["teacher"][0]
    overlapping = [phases[name]["least_seconds"] for name in OVERLAPPING]
    both = max(overlapping) if apart else sum(overlapping)
    rest = sum(phase["least_seconds"] for name, phase in phases.items() if name not in OVERLAPPING)
    together = median(sum(row[name] for name in OVERLAPPING) for row in seconds)
    step = median(row["step"] for row in seconds)
    return {
        "phases": phases,
        "generate + teacher": {"seconds": together, "least_seconds": both, "share": both / together},
        "step": {"seconds": step, "least_seconds": both + rest, "share": (both + rest) / step},
        "rates": best,
        "tokens": median(row["tokens/step"] for row in rows),
        "steps": len(rows),
    }


def _shares(seconds: float, least: float, work: Work, best: Mapping[str, float]) -> dict[str, Any]:
    return {
        "seconds": seconds,
        **asdict(work),
        "of_matrix_rate": work.flops / seconds / best["flops"],
        "of_bandwidth": work.bytes / seconds / best["bytes"],
        "least_seconds": least,
        "share": least / seconds,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the table, one line per phase; the last column is the least possible time divided by the measured time."""
    head = f"{'phase':<20}{'s':>8}{'GFLOP':>9}{'GFLOP/s':>9}{'of rate':>9}{'GB/s':>8}{'of memory':>11}{'of limit':>10}"
    lines = ["", head, "-" * len(head)]
    for name, phase in result["phases"].items():
        flops, size, seconds = phase["flops"] / 1e9, phase["bytes"] / 1e9, phase["seconds"]
        lines.append(
            f"{name:<20}{seconds:>8.3f}{flops:>9.1f}{flops / seconds:>9.1f}{phase['of_matrix_rate']:>9.1%}"
            f"{size / seconds:>8.2f}{phase['of_bandwidth']:>11.1%}{phase['share']:>10.1%}"
        )
    lines.append("-" * len(head))
    for name in ("generate + teacher", "step"):
        lines.append(f"{name:<20}{result[name]['seconds']:>8.3f}{'':46}{result[name]['share']:>10.1%}")
    rates = {(rate["flops"], rate["bytes"]) for rate in result["rates"].values()}
    best = "; ".join(f"{flops / 1e9:,.1f} GFLOP/s and {size / 1e9:,.1f} GB/s" for flops, size in sorted(rates))
    lines.append(f"\nMedians of {result['steps']} steps of {result['tokens']:.0f} tokens. Best rates: {best}.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
