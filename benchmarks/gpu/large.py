"""The whole loop at larger sizes on one GPU, with vLLM and Ray: the time of a step by phase, compared with the single
parts.

    python benchmarks/gpu/large.py [key=value ...] [--student 0.6B] [--teachers 1.7B 4B] [--steps 5] [--json OUT]
    python benchmarks/gpu/large.py --device cpu --student small --teachers small response_length=16   # on a CPU
    python benchmarks/gpu/large.py --config examples/cards/card_24gb --memory 24 --teachers 4B --no-bare

For each teacher, the pipeline runs with random weights: all roles take turns on one GPU, in bf16, with 64 prompts of 4
answers of 1,024 tokens and CUDA graphs in vLLM. Then the parts of the same steps run without the pipeline
(`bare_parts.py`), and the moves of each role off its device and back are measured. README.md explains the table. Not
run on a GPU yet; `cures.py` predicts its figures.

With `--config`, the layout and the sizes are those of a configuration, which gets these models and the demo's rows.
With `--memory`, another process occupies the rest of the card, so that every allocation meets the limit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from bare_parts import BareError, run_bare, time_moves  # noqa: E402
from limits import best_rates, compare  # noqa: E402
from pipeline_run import NAME, ONLY_STEPS, ShownLog, machine, run_pipeline  # noqa: E402
from shapes import SHAPES, make_served_model  # noqa: E402
from work import phase_devices  # noqa: E402

ROWS = HERE.parents[1] / "examples/demo/data/train.jsonl"
ROLES = ("student_train", "student_infer", "teacher")
MEMORY = "system/device_memory_gib"
ENGINE = "student_infer.strategy_args.strategy_config"
ENGINE_SHARE = 0.6  # of the memory, for an engine with a limit
PACK = 16_384  # tokens of a micro-batch
COMMON = (
    "num_gpus_per_node=1",
    "teacher_preflight=false",  # untrained models would not pass it
    *(f"{role}.device_mapping=[0]" for role in ROLES),
    "rollout_batch_size=64",
    "response_length=1024",
    "student_train.training_args.per_device_train_batch_size=64",
    "student_train.training_args.warmup_steps=0",
    "student_train.training_args.gradient_accumulation_steps=4",  # 64 x 4: one update per step
    f"student_train.max_tokens_per_microbatch_in_train={PACK}",
    f"student_train.max_tokens_per_microbatch_in_infer={PACK}",
    f"teacher.max_tokens_per_microbatch_in_infer={PACK}",
)
ON_CPU = (
    "++device_memory_gb=null",
    *(f"{role}.model_args.dtype=fp32" for role in ROLES),
)
# occupies the first card up to a given number of free bytes, until its input ends
BALLAST = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
ON_GPU = (
    *(f"{role}.model_args.dtype=bf16" for role in ROLES),
    f"rollout@{ENGINE}=gpu_colocated",
    f"{ENGINE}.max_num_seqs=256",
    # a cache of fixed size: otherwise the bare parts, which are on the device at the same time, do not fit
    f"{ENGINE}.gpu_memory_utilization=0.4",
    f"+{ENGINE}.kv_cache_memory_bytes={24 * 2**30}",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a run for each teacher, print its table, and write all figures."""
    options = parse(arguments)
    found: dict[str, Any] = {}
    for teacher in options.teachers:
        name = f"{options.student}, teacher {teacher}"
        with tempfile.TemporaryDirectory(prefix="large-") as directory:
            found[name] = measured(name, teacher, options, Path(directory))
        print("\n".join(table(name, found[name])), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        settings = {**vars(options), "json": None, "config": str(options.config)}
        options.json.write_text(
            json.dumps({"runs": found, "settings": settings, "machine": machine()}, indent=1) + "\n"
        )
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line; exit code 2 if no step is left to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", choices=SHAPES, default="0.6B")
    parser.add_argument("--teachers", nargs="+", choices=SHAPES, default=["1.7B", "4B"])
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="warm-up included")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="first steps, not counted")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-bare", action="store_true", help="measure only the pipeline")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a configuration in place of the demo's")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of the card that the run may use")
    parser.add_argument(
        "--rates", type=float, nargs=2, metavar=("FLOPS", "BYTES"), help="of the device per second (default: measured)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override keys of the demo's configuration")
    options = parser.parse_intermixed_args(arguments)
    if options.warmup < 0 or options.steps <= options.warmup:
        parser.error("--steps must be more than --warmup")
    return options


def settings_of(options: argparse.Namespace, models: Mapping[str, Path]) -> list[str]:
    """Return the overrides of the demo's configuration."""
    student, teacher = models["student"], models["teacher"]
    paths = dict(zip(ROLES, (student, student, teacher), strict=True))
    named = [f"{role}.model_args.model_name_or_path={path}" for role, path in paths.items()]
    if options.config:
        own = ["++teacher_preflight=false", f"student_train.data_args.file_name=[{ROWS}]"]
        own += _limited(options.memory) if options.memory else []
        on_device = ON_CPU if options.device == "cpu" else ()
    else:
        own, on_device = list(COMMON), ON_GPU if options.device == "cuda" else ()
    return [*own, *on_device, *named, f"max_steps={options.steps}", *options.overrides]


def _limited(memory: float) -> list[str]:
    """Return the engine's share of the whole card, which is what vLLM reads, for a run that may use `memory` GiB."""
    import torch

    share = ENGINE_SHARE * memory * 2**30 / torch.cuda.mem_get_info()[1]
    return [f"{ENGINE}.gpu_memory_utilization={share:.4f}", f"++device_memory_gb={memory:g}"]


def configuration(options: argparse.Namespace) -> tuple[str, str]:
    """Return the directory and the name of the configuration."""
    if not options.config:
        return "demo", "onpolicy_distill"
    return str(options.config.resolve().parent), options.config.stem


@contextmanager
def at_most(memory: float | None) -> Iterator[None]:
    """Leave `memory` GiB of the first card to other processes."""
    if not memory:
        yield
        return
    command = [sys.executable, "-c", BALLAST, str(int(memory * 2**30))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        try:
            if not process.stdout.readline():
                sys.exit("the rest of the card could not be occupied; is another process on it?")
            yield
        finally:
            process.stdin.close()


def measured(name: str, teacher: str, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the figures of one run."""
    from roll_opd.planner.load_plan import load_plan

    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {name}: {text}", flush=True)

    say("making models")
    shapes = {"student": options.student, "teacher": teacher}
    models = {
        role: make_served_model(directory / role, SHAPES[shape], seed, options.device)
        for seed, (role, shape) in enumerate(shapes.items())
    }
    overrides = settings_of(options, models)
    settings = (*ONLY_STEPS, f"output_dir={directory}", *overrides)
    names = configuration(options)
    plan = load_plan(*names, settings, pure=True)
    say("the device's rates")
    given = dict(zip(("flops", "bytes"), options.rates, strict=True)) if options.rates else None
    best = dict.fromkeys(phase_devices(plan), given) if given else best_rates(plan)
    say("the pipeline")
    shown = ShownLog(directory / "log", say)
    with at_most(options.memory):
        rows = run_pipeline(*names, overrides, directory, lambda _: shown.look())[options.warmup :]
    found = compare(plan, rows, best)
    found["rows"] = rows
    found["device_memory_gib"] = max((row.get(MEMORY, 0.0) for row in rows), default=0.0) or None  # None on a CPU
    found["startup_seconds"] = startup_seconds(directory)
    found["other_seconds"] = median(row["time/other"] for row in rows)
    if options.no_bare:
        return found
    log = directory / "parts.log"
    try:
        say("the parts alone")
        bare = run_bare(plan, log)[options.warmup :]
        found["bare"] = {part: median(row[part] for row in bare) for part in bare[0] if part != "tokens"}
        say("roles that leave the device and return")
        found["moves"] = time_moves(plan, log)
    except BareError as error:
        found["bare_failed"] = str(error)
        say(f"{error}\n{log.read_text()[-4000:] if log.exists() else ''}")
    return found


def startup_seconds(directory: Path) -> float | None:
    """Return the seconds until the first step, from row 0 of the run."""
    lines = (directory / NAME / "latest" / "metrics.jsonl").read_text().splitlines()
    return next((row["time/startup"] for row in map(json.loads, lines) if "time/startup" in row), None)


def table(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return the lines of a run: each phase, its part without the pipeline, and its least time at the device's
    rates."""
    step, bare = found["step"]["seconds"], found.get("bare", {})
    lines = [f"{name}: medians of {found['steps']} steps of {found['tokens']:.0f} tokens"]
    lines.append(
        f"{'':<14}{'s':>9}{'of step':>9}{'bare s':>9}{'least s':>9}{'of matrix rate':>16}{'of memory rate':>16}"
    )
    for phase, one in found["phases"].items():
        alone = f"{bare[phase]:>9.3f}" if phase in bare else f"{'-':>9}"
        shares = f"{one['of_matrix_rate']:>16.1%}{one['of_bandwidth']:>16.1%}"
        lines.append(
            f"{phase:<14}{one['seconds']:>9.3f}{one['seconds'] / step:>9.1%}{alone}{one['least_seconds']:>9.3f}{shares}"
        )
    lines.append(f"{'other':<14}{found['other_seconds']:>9.3f}{found['other_seconds'] / step:>9.1%}")
    lines.append(f"{'step':<14}{step:>9.3f}{1:>9.1%}" + (f"{bare['step']:>9.3f}" if bare else f"{'-':>9}"))
    if bare:
        lines.append(f"no part runs in {step - bare['step']:.3f} s of a step ({1 - bare['step'] / step:.1%})")
    if found["startup_seconds"] is not None:
        lines.append(f"start-up {found['startup_seconds']:.1f} s")
    for role, one in found.get("moves", {}).items():
        first, again = one["away"], one["back"]
        size = f", {one['bytes'] / 1e9:.2f} GB" if one.get("bytes") else ""
        lines.append(f"{role}: leaves in {first[-1]:.3f} s (first {first[0]:.3f}), returns in {again[-1]:.3f} s{size}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
