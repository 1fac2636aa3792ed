"""What the pipeline costs: its step time over the sum of the same parts called bare.

Runs the real pipeline, then the same steps again with the engines in plain processes, without Ray and without a
pipeline: one part at a time, same prompts, seeds, weights, layouts and threads. README.md says how to read the table.

    python benchmarks/step_overhead.py [--steps N] [--rounds N] [--json OUT] [--at-most 1.15] [key=value ...]
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bare_parts import BareError, run_bare

from roll_opd.config.build import load_plan

REPOSITORY = Path(__file__).resolve().parent.parent
ENTRY = REPOSITORY / "examples" / "start_onpolicy_distill_pipeline.py"
# nothing but steps: what is left of a checkpoint and a validation is subtracted
OVERRIDES = ("++validation=null", "++save_steps=0", "++eval_steps=0", "exp_name=step_overhead")
NOT_A_STEP = ("validate", "checkpoint")
STOP_SECONDS = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table; return 1 when the pipeline failed or the ratio is above `--at-most`."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that what was started is ended
    pipeline: list[dict[str, float]] = []
    bare: list[dict[str, float]] = []
    for number in range(options.rounds):
        sides = [("the pipeline", run_pipeline, pipeline), ("the parts alone", run_parts, bare)]
        for name, run, rows in sides if number % 2 == 0 else reversed(sides):  # in turns: a machine's speed drifts
            print(f"Round {number + 1} of {options.rounds}: {name} ...", flush=True)
            with tempfile.TemporaryDirectory(prefix="step_overhead-") as directory:
                overrides = [*OVERRIDES, f"output_dir={directory}", f"max_steps={options.steps}", *options.overrides]
                rows += run(options, overrides, Path(directory))[options.warmup :]
    result = {**compare(pipeline, bare), "settings": vars(options), "machine": machine()}
    print(table(result))
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps({**result, "pipeline": pipeline, "bare": bare}, indent=1) + "\n")
    return int(options.at_most is not None and result["ratio"] > options.at_most)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends with exit code 2 where no step would be left to measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config_path", default="demo", metavar="DIR")
    parser.add_argument("--config_name", default="onpolicy_distill", metavar="NAME")
    parser.add_argument("--steps", type=int, default=15, metavar="N", help="of a round, warm-up included")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="first steps of a round, not counted")
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="pipeline and parts; the next parts and pipeline"
    )
    parser.add_argument("--json", metavar="OUT", help="write the figures of every step here")
    parser.add_argument("--at-most", type=float, metavar="RATIO", help="exit with 1 when the ratio is above")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    options = parser.parse_args(arguments)
    if options.warmup < 0 or options.rounds < 1 or options.steps <= options.warmup:
        parser.error("--steps must be more than --warmup, and --rounds at least 1")
    return options


def compare(pipeline: Sequence[dict[str, float]], bare: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians over steps, in seconds. Rows map a part to seconds, `step` to the whole, `tokens` to a count."""
    names = [name for name in pipeline[0] if name not in ("step", "tokens")]
    step, total = (median(row["step"] for row in rows) for rows in (pipeline, bare))
    return {
        "parts": {
            name: {
                "bare": median(row[name] for row in bare) if name in bare[0] else None,
                "pipeline": median(row[name] for row in pipeline),
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
    """The breakdown as text. A phase without a bare part has no ratio."""
    lines = [f"\n{'part':<14}{'bare s':>10}{'in pipeline s':>16}{'ratio':>8}", "-" * 48]
    for name, seconds in result["parts"].items():
        alone = seconds["bare"]
        left = f"{alone:>10.4f}" if alone is not None else f"{'-':>10}"
        ratio = f"{seconds['pipeline'] / alone:>8.2f}" if alone else f"{'-':>8}"
        lines.append(f"{name:<14}{left}{seconds['pipeline']:>16.4f}{ratio}")
    lines += ["-" * 48, f"{'step':<14}{result['bare_step']:>10.4f}{result['pipeline_step']:>16.4f}"]
    lines[-1] += f"{result['ratio']:>8.3f}"
    tokens = result["tokens"]
    lines.append(f"\nMedians of {result['steps']} steps a side; {tokens['pipeline']:.0f} tokens generated by the")
    lines[-1] += f" pipeline, {tokens['bare']:.0f} bare."
    if abs(tokens["pipeline"] / tokens["bare"] - 1) > 0.01:
        lines.append("WARNING: the two sides did not do the same work; the ratio is not to be trusted.")
    lines.append(f"fastest step / fastest sum of the bare parts = {result['ratio_of_fastest']:.3f}")
    lines.append(f"step time / sum of the bare parts = {result['ratio']:.3f}")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Where this was measured."""
    from importlib.metadata import version

    versions = {name: version(name) for name in ("torch", "megatron-core", "ray")}
    cores = len(os.sched_getaffinity(0))
    return {"cores": cores, "load": os.getloadavg(), "python": platform.python_version(), "versions": versions}


def run_pipeline(options: argparse.Namespace, overrides: Sequence[str], directory: Path) -> list[dict[str, float]]:
    """Run the entry script as a user would and read each step from its metrics.jsonl."""
    config = ["--config_path", options.config_path, "--config_name", options.config_name]
    log = directory / "log"
    with log.open("w") as output:
        command = [sys.executable, str(ENTRY), *config, *overrides]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:  # we are interrupted: let it end its own processes first
                process.send_signal(signal.SIGINT)
                process.wait(STOP_SECONDS)
    if code:
        sys.exit(f"the pipeline ended with exit code {code}:\n{log.read_text()[-4000:]}")
    lines = (directory / "step_overhead" / "latest" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]  # step 0 is the start
    return [pipeline_row(row) for row in rows]


def run_parts(options: argparse.Namespace, overrides: Sequence[str], directory: Path) -> list[dict[str, float]]:
    """The same steps of the same plan, each part alone."""
    log = directory / "parts.log"
    plan = load_plan(options.config_path, options.config_name, tuple(overrides), pure=True)
    try:
        return run_bare(plan, log)
    except BareError as error:
        sys.exit(f"{error}\n{log.read_text()[-4000:] if log.exists() else ''}")


def pipeline_row(metrics: dict[str, float]) -> dict[str, float]:
    """One line of metrics.jsonl as seconds; what is no step (validation, checkpoint) is taken out of the whole."""
    timed = {name: value for name, value in metrics.items() if name.startswith("time/") and name.count("/") == 1}
    seconds = {name.removeprefix("time/"): value for name, value in timed.items()}
    beside = sum(seconds.pop(name, 0.0) for name in NOT_A_STEP)
    return {**seconds, "step": seconds["step"] - beside, "tokens": metrics["rollout/generated_tokens"]}


if __name__ == "__main__":
    sys.exit(main())
