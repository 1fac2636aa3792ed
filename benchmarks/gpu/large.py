"""The whole loop at larger sizes on one GPU, with vLLM and Ray: the time of a step by phase, compared with the single
parts.

    python benchmarks/gpu/large.py [key=value ...] [--student 0.6B] [--teachers 1.7B 4B] [--steps 5] [--json OUT]
    python benchmarks/gpu/large.py --device cpu --student small --teachers small response_length=16   # on a CPU

For each teacher, the pipeline runs with random weights: all roles take turns on one GPU, in bf16, with 64 prompts of 4
answers of 1,024 tokens and CUDA graphs in vLLM. Then the parts of the same steps run without the pipeline
(`bare_parts.py`), and the moves of each role off its device and back are measured. README.md explains the table. Not
run on a GPU yet; `cures.py` predicts its figures.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from bare_parts import BareError, run_bare, time_moves  # noqa: E402
from limits import best_rates, compare  # noqa: E402
from pipeline_run import NAME, ONLY_STEPS, ShownLog, machine, run_pipeline  # noqa: E402
from shapes import SHAPES, make_model  # noqa: E402

DEMO = HERE.parents[1] / "examples/demo/models/student"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ROLES = ("student_train", "student_infer", "teacher")
ENGINE = "student_infer.strategy_args.strategy_config"
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
        settings = {**vars(options), "json": None}
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
    on_device = ON_GPU if options.device == "cuda" else ()
    return [*COMMON, *on_device, *named, f"max_steps={options.steps}", *options.overrides]


def measured(name: str, teacher: str, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the figures of one run."""
    from roll_opd.planner.load_plan import load_plan

    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {name}: {text}", flush=True)

    say("making models")
    shapes = {"student": options.student, "teacher": teacher}
    models = {
        role: made(directory / role, shape, options.device, seed) for seed, (role, shape) in enumerate(shapes.items())
    }
    overrides = settings_of(options, models)
    settings = (*ONLY_STEPS, f"output_dir={directory}", *overrides)
    plan = load_plan("demo", "onpolicy_distill", settings, pure=True)
    say("rates of the device")
    best = best_rates(plan)
    say("the pipeline")
    shown = ShownLog(directory / "log", say)
    rows = run_pipeline("demo", "onpolicy_distill", overrides, directory, lambda _: shown.look())[options.warmup :]
    found = compare(plan, rows, best)
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


def made(directory: Path, shape: str, device: str, seed: int) -> Path:
    """Write a model with random weights, and the demo's tokenizer padded to its vocabulary; return `directory`."""
    make_model(directory, SHAPES[shape], seed, device)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    special = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    taken = {*special.values(), *tokenizer["model"]["vocab"].values()}
    # words that occur in no text; with random weights, a model mostly generates these, and seldom the end token
    tokenizer["model"]["vocab"] |= {
        f"filler{number}": number for number in range(SHAPES[shape].vocab) if number not in taken
    }
    for file in TOKENIZER_FILES:
        shutil.copyfile(DEMO / file, directory / file)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    ends = {"eos_token_id": special[settings["eos_token"]], "pad_token_id": special[settings["pad_token"]]}
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"bos_token_id": None} | ends, indent=1))
    (directory / "generation_config.json").write_text(json.dumps(ends))
    return directory


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
