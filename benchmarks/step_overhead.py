"""Overhead of the pipeline: its step time divided by the sum of the same parts without the pipeline.

Runs the real pipeline, and then the same steps with the engines in plain processes, without Ray and the pipeline. The
parts run one at a time, with the same prompts, seeds, weights, layouts and threads. README.md explains the table.

    python benchmarks/step_overhead.py [--steps N] [--rounds N] [--json OUT] [--at-most 1.15] [key=value ...]
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bare_parts import BareError, run_bare
from pipeline_run import ONLY_STEPS, machine, pipeline_row, run_pipeline

from roll_opd.planner.load_plan import load_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; return 1 if the pipeline failed or the ratio is above `--at-most`."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raise an exception, so that started processes are ended
    pipeline: list[dict[str, float]] = []
    bare: list[dict[str, float]] = []
    for number in range(options.rounds):
        sides = [("the pipeline", run_steps, pipeline), ("the parts alone", run_parts, bare)]
        # alternately, because a machine's speed drifts
        for name, run, rows in sides if number % 2 == 0 else reversed(sides):
            print(f"Round {number + 1} of {options.rounds}: {name} ...", flush=True)
            with tempfile.TemporaryDirectory(prefix="step_overhead-") as directory:
                overrides = [f"max_steps={options.steps}", *options.overrides]
                rows += run(options, overrides, Path(directory))[options.warmup :]
    result = {**compare(pipeline, bare), "settings": vars(options), "machine": machine()}
    print(table(result))
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps({**result, "pipeline": pipeline, "bare": bare}, indent=1) + "\n")
    return int(options.at_most is not None and result["ratio"] > options.at_most)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line; exit code 2 if no step is left to measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config_path", default="demo", metavar="DIR")
    parser.add_argument("--config_name", default="onpolicy_distill", metavar="NAME")
    parser.add_argument("--steps", type=int, default=15, metavar="N", help="steps of a round, warm-up included")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="first steps of a round, not counted")
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="each measures pipeline and parts, in alternating order"
    )
    parser.add_argument("--json", metavar="OUT", help="write the figures of every step here")
    parser.add_argument("--at-most", type=float, metavar="RATIO", help="exit with 1 if the ratio is higher")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override keys of the configuration")
    options = parser.parse_args(arguments)
    if options.warmup < 0 or options.rounds < 1 or options.steps <= options.warmup:
        parser.error("--steps must be more than --warmup, and --rounds at least 1")
    return options


def compare(pipeline: Sequence[dict[str, float]], bare: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return medians over steps, in seconds. Rows map each part to seconds, `step` to the total, and `tokens` to a
    count."""
    names = [name for name in {**pipeline[0], **bare[0]} if name not in ("step", "tokens")]
    step, total = (median(row["step"] for row in rows) for rows in (pipeline, bare))
    return {
        "parts": {
            name: {
                "bare": median(row[name] for row in bare) if name in bare[0] else None,
                "pipeline": median(row[name] for row in pipeline) if name in pipeline[0] else None,
            }
            for name in names
        },
        "bare_step": total,
        "pipeline_step": step,
        "ratio": step / total,
        "ratio_of_fastest": min(row["step"] for row in pipeline) / min(row["step"] for row in bare),
        "tokens": {"bare": sum(row["tokens"] for row in bare), "pipeline": sum(row["tokens"] for row in pipeline)},
        "steps": len(pipeline),
    }


def table(result: dict[str, Any]) -> str:
    """Return the breakdown as text. A phase without a corresponding part has no ratio."""
    lines = [f"\n{'part':<14}{'bare s':>10}{'in pipeline s':>16}{'ratio':>8}", "-" * 48]
    for name, seconds in result["parts"].items():
        alone, inside = seconds["bare"], seconds["pipeline"]
        left = f"{alone:>10.4f}" if alone is not None else f"{'-':>10}"
        right = f"{inside:>16.4f}" if inside is not None else f"{'-':>16}"
        ratio = f"{inside / alone:>8.2f}" if alone and inside is not None else f"{'-':>8}"
        lines.append(f"{name:<14}{left}{right}{ratio}")
    lines += ["-" * 48, f"{'step':<14}{result['bare_step']:>10.4f}{result['pipeline_step']:>16.4f}"]
    lines[-1] += f"{result['ratio']:>8.3f}"
    tokens = result["tokens"]
    lines.append(f"\nMedians of {result['steps']} steps a side; {tokens['pipeline']:.0f} tokens generated by the")
    lines[-1] += f" pipeline, {tokens['bare']:.0f} bare."
    if abs(tokens["pipeline"] / tokens["bare"] - 1) > 0.01:
        lines.append("WARNING: the two sides did different work, so the ratio is not valid.")
    lines.append(f"fastest step / fastest sum of the bare parts = {result['ratio_of_fastest']:.3f}")
    lines.append(f"step time / sum of the bare parts = {result['ratio']:.3f}")
    return "\n".join(lines)


def run_steps(options: argparse.Namespace, overrides: Sequence[str], directory: Path) -> list[dict[str, float]]:
    """Return the seconds of each step of the pipeline."""
    rows = run_pipeline(options.config_path, options.config_name, overrides, directory)
    return [pipeline_row(row) for row in rows]


def run_parts(options: argparse.Namespace, overrides: Sequence[str], directory: Path) -> list[dict[str, float]]:
    """Return the seconds of the same steps with each part run separately."""
    log = directory / "parts.log"
    settings = (*ONLY_STEPS, f"output_dir={directory}", *overrides)
    plan = load_plan(options.config_path, options.config_name, settings, pure=True)
    try:
        return run_bare(plan, log)
    except BareError as error:
        sys.exit(f"{error}\n{log.read_text()[-4000:] if log.exists() else ''}")


if __name__ == "__main__":
    sys.exit(main())
