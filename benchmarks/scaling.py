"""Time of each phase and memory of each role as work grows, with fitted exponents.

One axis grows at a time: the batch, the answers' length, the models' parameters, or the ranks of every role. Every
point is a run of the real pipeline with models made for the measurement. README.md explains the table.

    python benchmarks/scaling.py [key=value ...] [--axis batch length model ranks] [--factors 1 2 4 8] [--steps N]
        [--warmup N] [--student 2.5e6] [--teacher 10e6] [--json OUT] [--plot OUT.svg]
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from loglog import Panel, drawn
from models import made_models
from pipeline_run import ONLY_STEPS, machine, pipeline_row, run_pipeline
from process_memory import PeakMemory
from work import phase_work

from roll_opd.config.plan import RunPlan
from roll_opd.models.flops import used_parameters
from roll_opd.models.model_info import read_model
from roll_opd.planner.load_plan import load_plan

AXES = ("batch", "length", "model", "ranks")
WORK = {  # axis -> quantity against which the cost is fitted
    "batch": "tokens of a step",
    "length": "tokens of a step",
    "model": "parameters of the phase's model",
    "ranks": "ranks of every role",
}
PROMPTS, ANSWERS, LENGTH, SEQUENCES = 8, 4, 64, 8  # sizes at factor 1; SEQUENCES: per micro-batch
MORE_PROMPTS = 32  # along the axis `ranks`, so that every rank has prompts
MOST_RANKS = 4
SPREAD = [  # along the other axes: student and sampler on separate devices, the teacher on both
    "student_train.device_mapping=[0]",
    "student_infer.device_mapping=[1]",
    "parallel@teacher.strategy_args.strategy_config=tp2",
]
SUPERLINEAR = 1.1
NOISE = 0.02  # tolerance for an exponent of counted work, since lengths differ
FLAT = 1.05  # memory counts as constant if it grows by a smaller factor from the first point to the last
POWERS = [step / 20 for step in range(1, 61)]  # 0.05 to 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the requested axes, print their tables, and draw all axes in the JSON file."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raise an exception, so that started processes are ended
    is_there = options.json and options.json.is_file()
    before = json.loads(options.json.read_text())["axes"] if is_there else {}
    results = {axis: {"points": old["points"], **fitted(old["points"], axis)} for axis, old in before.items()}
    if not options.axis:
        print("\n".join(table(axis, result) for axis, result in results.items()))
    for axis in options.axis:
        factors = [factor for factor in options.factors if axis != "ranks" or factor <= MOST_RANKS]
        points = []
        for factor in factors:
            print(f"{axis} x {factor} ...", flush=True)
            with tempfile.TemporaryDirectory(prefix="scaling-") as directory:
                points.append({"factor": factor, **measure(axis, factor, options, Path(directory))})
        results[axis] = {"points": points, **fitted(points, axis)}
        print(table(axis, results[axis]), flush=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            settings = {**vars(options), "json": None, "plot": None, "axis": None}
            whole = {"axes": results, "settings": settings, "machine": machine()}
            options.json.write_text(json.dumps(whole, indent=1) + "\n")
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        options.plot.write_text(drawn(panels(results), columns=2))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line; exit code 2 if there is nothing to fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--axis", nargs="*", choices=AXES, default=list(AXES), help="no name: show only earlier measurements"
    )
    parser.add_argument(
        "--factors", type=int, nargs="+", default=[1, 2, 4, 8], help="for the axis `ranks`, only factors up to 4"
    )
    parser.add_argument(
        "--config_path", default="demo", metavar="DIR", help="directory of a configuration with the demo's roles"
    )
    parser.add_argument("--config_name", default="onpolicy_distill", metavar="NAME")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of a run, warm-up included")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="first steps of a run, not counted")
    parser.add_argument(
        "--student", type=float, default=2.5e6, metavar="N", help="parameters of the student at factor 1"
    )
    parser.add_argument("--teacher", type=float, default=10e6, metavar="N")
    parser.add_argument("--json", type=Path, metavar="OUT", help="add the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="OUT.svg", help="draw the figures of all axes here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override keys of the configuration")
    options = parser.parse_intermixed_args(arguments)
    if options.warmup < 0 or options.steps <= options.warmup:
        parser.error("--steps must be more than --warmup")
    if len(set(options.factors)) < 2 or min(options.factors) < 1:
        parser.error("--factors must be two numbers or more, from 1 on")
    options.factors = sorted(set(options.factors))
    return options


def settings_of(axis: str, factor: int) -> list[str]:
    """Return the overrides of the demo's configuration for one point, except for its models."""
    ranks = factor if axis == "ranks" else 1
    prompts = MORE_PROMPTS if axis == "ranks" else PROMPTS * (factor if axis == "batch" else 1)
    sequences = prompts * ANSWERS
    settings = [
        f"rollout_batch_size={prompts}",
        f"num_return_sequences_in_group={ANSWERS}",
        f"response_length={LENGTH * (factor if axis == 'length' else 1)}",
        f"student_train.training_args.per_device_train_batch_size={SEQUENCES}",
        f"student_train.training_args.gradient_accumulation_steps={sequences // SEQUENCES // ranks}",  # one update
        f"student_infer.strategy_args.strategy_config.max_num_seqs={sequences}",  # all at the same time
    ]
    if axis == "ranks":  # copies of every role on the same devices
        roles = ("student_train", "student_infer", "teacher")
        settings += [f"num_gpus_per_node={MOST_RANKS}", "parallel@teacher.strategy_args.strategy_config=single"]
        return settings + [f"{role}.device_mapping=list(range(0,{ranks}))" for role in roles]
    return settings + SPREAD


def measure(axis: str, factor: int, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run one point; return seconds of each phase in its fastest step, its work, and the largest process of each
    role."""
    larger = factor if axis == "model" else 1
    overrides = made_models(directory, options.student * larger, options.teacher * larger)
    overrides += [*settings_of(axis, factor), f"max_steps={options.steps}", *options.overrides]
    settings = (*ONLY_STEPS, f"output_dir={directory}", *overrides)
    plan = load_plan(options.config_path, options.config_name, settings, pure=True)
    memory = PeakMemory()
    rows = run_pipeline(options.config_path, options.config_name, overrides, directory, memory.look)[options.warmup :]
    works = [phase_work(plan, row) for row in rows]
    seconds = [pipeline_row(row) for row in rows]
    tokens = median(row["tokens/step"] for row in rows)
    sizes = _sizes(plan)
    device = max((row["system/device_memory_gib"] for row in rows if "system/device_memory_gib" in row), default=None)
    return {
        "phases": {
            name: {
                "seconds": min(row[name] for row in seconds),
                "flops": median(work[name].flops for work in works),
                "bytes": median(work[name].bytes for work in works),
                "against": {"model": sizes[name], "ranks": factor}.get(axis, tokens),
            }
            for name in works[0]
        },
        "step_seconds": min(row["step"] for row in seconds),
        "peak_bytes": memory.by_role(),
        "all_gib": max(row["system/memory_gib"] for row in rows),
        "device_gib": device,
        "tokens": tokens,
    }


def _sizes(plan: RunPlan) -> dict[str, int]:
    """Return the numbers of parameters on which the cost of each phase depends."""
    student, teacher = (read_model(Path(worker.model.path)) for worker in (plan.student, plan.frozen_roles()[0]))
    of_student = used_parameters(student) + student.hidden * student.vocab
    sizes = dict.fromkeys(("generate", "old_logprobs", "train", "weight_sync"), of_student)
    return {**sizes, "teacher": used_parameters(teacher) + teacher.hidden * teacher.vocab}


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the k of y = c x^k by least squares in logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def growing_exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the k of y = a + c x^k by least squares, a >= 0: the constant memory of a process is not part of the
    growth.

    None if y grows by less than `FLAT`, or if there are too few points.
    """
    xs, ys = np.asarray(x, float) / x[0], np.asarray(y, float)
    if ys[-1] < FLAT * ys[0] or len(ys) < 3:
        return None

    def error(power: float) -> float:
        terms = np.stack([np.ones_like(xs), xs**power], axis=1)
        (floor, _), *_ = np.linalg.lstsq(terms, ys, rcond=None)
        if floor < 0:
            terms = terms[:, 1:]
        found, *_ = np.linalg.lstsq(terms, ys, rcond=None)
        return float(((terms @ found - ys) ** 2).sum())

    return min(POWERS, key=error)


def last_growth(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the same k for only the last three points, whose x are powers of one number; None if y did not grow twice.

    If the start-up needs more memory than the first steps, this raises the first points, but not the last.
    """
    before, after = (y[place] - y[place - 1] for place in (-2, -1)) if len(y) > 2 else (0.0, 0.0)
    return float(np.log(after / before) / np.log(x[-1] / x[-2])) if min(before, after) > 0 else None


def fitted(points: Sequence[Mapping[str, Any]], axis: str) -> dict[str, Any]:
    """Return the exponents of every phase's time and work, and of every role's memory."""
    phases = {}
    for name in points[0]["phases"]:
        rows = [point["phases"][name] for point in points]
        x, seconds = [row["against"] for row in rows], [row["seconds"] for row in rows]
        kind = "flops" if rows[0]["flops"] else "bytes"
        phases[name] = {
            "exponent": exponent(x, seconds),
            "last": exponent(x[-2:], seconds[-2:]),
            "of_work": exponent(x, [row[kind] for row in rows]),
        }
    factors = [point["factor"] for point in points]
    roles = {}
    for role in points[0]["peak_bytes"]:
        peaks = [point["peak_bytes"][role] for point in points]
        roles[role] = {"exponent": growing_exponent(factors, peaks), "last": last_growth(factors, peaks)}
    return {"against": WORK[axis], "phases": phases, "roles": roles}


def verdict(fit: Mapping[str, float], axis: str) -> str:
    """Return a short verdict on the exponents of a phase, or ""; along the ranks its time should fall."""
    if axis == "ranks":
        return "grows" if fit["exponent"] > SUPERLINEAR - 1 else ""
    by_nature = fit["of_work"] > 1 + NOISE and fit["exponent"] <= fit["of_work"] + SUPERLINEAR - 1
    if fit["exponent"] > SUPERLINEAR:
        return "superlinear, as its work is" if by_nature else "SUPERLINEAR"
    return (
        "superlinear at the end" if fit["last"] > fit["of_work"] + SUPERLINEAR - 1 and fit["last"] > SUPERLINEAR else ""
    )


def table(axis: str, result: Mapping[str, Any]) -> str:
    """Return seconds by phase and MiB by role at every factor, with exponents."""
    points = result["points"]
    head = f"{axis:<14}" + "".join(f"{'x ' + str(point['factor']):>9}" for point in points)
    head += f"{'exponent':>10}{'last':>7}{'of work':>9}"
    lines = ["", f"{head}   (against {result['against']})", "-" * len(head)]
    for name, fit in result["phases"].items():
        cells = "".join(f"{point['phases'][name]['seconds']:>8.3f}s" for point in points)
        numbers = f"{fit['exponent']:>10.2f}{fit['last']:>7.2f}{fit['of_work']:>9.2f}"
        lines.append(f"{name:<14}{cells}{numbers}   {verdict(fit, axis)}".rstrip())
    lines.append(f"{'step':<14}" + "".join(f"{point['step_seconds']:>8.3f}s" for point in points))
    lines.append("-" * len(head))
    for role, fit in result["roles"].items():
        cells = "".join(f"{point['peak_bytes'][role] / 2**20:>6.0f}MiB" for point in points)
        power, last = (fit[name] for name in ("exponent", "last"))
        falls = points[-1]["peak_bytes"][role] * FLAT < points[0]["peak_bytes"][role]
        shown = (
            f"{'falls' if falls else 'flat':>10}"
            if power is None
            else f"{power:>10.2f}" + (f"{last:>7.2f}" if last else "")
        )
        more = "SUPERLINEAR" if power and last and min(power, last) > SUPERLINEAR else ""
        lines.append(f"{role:<14}{cells}{shown:<26}   {more}".rstrip())
    lines.append(f"{'all':<14}" + "".join(f"{point['all_gib'] * 1024:>6.0f}MiB" for point in points))
    if points[0]["device_gib"] is not None:
        lines.append(f"{'fullest GPU':<14}" + "".join(f"{point['device_gib'] * 1024:>6.0f}MiB" for point in points))
    return "\n".join(lines)


def panels(results: Mapping[str, Any]) -> list[Panel]:
    """Return two panels per axis: seconds and memory by factor."""
    found = []
    for axis in (axis for axis in AXES if axis in results):
        points, fits = results[axis]["points"], results[axis]["phases"]
        x = [float(point["factor"]) for point in points]
        names = {name: f"{name} ({fit['exponent']:.2f})" for name, fit in fits.items()}
        times = {names[name]: [point["phases"][name]["seconds"] for point in points] for name in names}
        peaks = {role: [point["peak_bytes"][role] / 2**20 for point in points] for role in points[0]["peak_bytes"]}
        found += [Panel(f"{axis}: seconds a step (exponent)", x, times), Panel(f"{axis}: peak MiB", x, peaks)]
    return found


if __name__ == "__main__":
    sys.exit(main())
