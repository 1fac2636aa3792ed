"""Async rollouts: whether runs still learn at each bound S, and how fast their steps are.

    python benchmarks/async_table.py [--cells tasks signals] [--tasks demo tail game] [--bounds 1 2 4]
        [--seeds 42 43 44] [--json OUT] [--runs DIR] [key=value ...]
    python benchmarks/async_table.py --throughput [--stated ANSWER:LEARN] [--bounds 0 1 2 4 8] [--steps 24]
        [--jobs 1] [--json OUT] [--svg OUT]

`tasks` runs each task at each bound: the demo, the demo with answers that take a long-tailed time, and FrozenLake.
`signals` runs the demo at S = 8: reverse KL from the learner's log-probs and from stored log-probs
(`stored_signal.py`), forward KL, and GRPO with truncated importance weights. Runs that OUT already has are skipped.
`--runs` keeps the directories of the runs.

`--throughput` runs the demo at each bound without validation and compares the steps with the parts of the synchronous
steps. With `--stated 6:12`, the answers to a prompt together take at least a lognormal time with a mean of 6 s, with
`SLOTS` prompts at the same time, and the updates of a step take at least 12 s (`stated_times.py`), as if both sides had
devices of these speeds; the real parts run within these times. The table then also has the step of the simulator. The
real launcher starts every run, with the engines on a separate slot.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loglog import Panel, drawn
from pipeline_run import machine
from stated_times import SECONDS

from roll_opd.extras.advice.async_simulator import Costs, lognormal, simulate
from roll_opd.extras.alarm.divergence_alarm import ESS, KL, DivergenceAlarm
from roll_opd.rollout.staleness import Pace
from roll_opd.tracking.summary import ACCURACY

ROOT = Path(__file__).resolve().parent.parent
PURE, RLVR = "examples/start_onpolicy_distill_pipeline.py", "examples/start_rlvr_pipeline.py"
AGENTIC, STORED = "examples/start_agentic_pipeline.py", "benchmarks/stored_signal.py"
STATED = "benchmarks/stated_times.py"
TIS = "+train_infer_correction={is_weight: {enabled: true}}"
PROMPTS, RUNS, SLOTS, SPREAD = 16, 2, 16, 0.5  # with stated times; the spread is that of the logarithm
# `slow_answers` (task `tail`) waits lognormal seconds, by the question, before an answer; with `stated_answers`, the
# answers to a prompt take at least lognormal seconds
SLOW_WORKFLOW = """
import asyncio
import random

from roll_opd.workflows import WORKFLOWS
from roll_opd.extras.trinity.workflows.single_turn import OnPolicyDistillWorkflow


@WORKFLOWS.register_module("slow_answers")
class SlowAnswers(OnPolicyDistillWorkflow):
    async def run_async(self):
        await asyncio.sleep(min(10.0, random.Random(str(self.task.raw_task)).lognormvariate(-1.5, 1.5)))
        return await super().run_async()


TIMES = random.Random(0)


@WORKFLOWS.register_module("stated_answers")
class StatedAnswers(OnPolicyDistillWorkflow):
    async def run_async(self):
        median, spread = self.task.workflow_args["seconds"]
        waiting = asyncio.sleep(TIMES.lognormvariate(median, spread))
        return (await asyncio.gather(super().run_async(), waiting))[0]
"""


@dataclass(frozen=True)
class Task:
    """Launcher, configuration and settings of a run; it must reach `bar` in `metric`."""

    launcher: str
    config: tuple[str, str]
    settings: tuple[str, ...] = ()
    metric: str = ACCURACY
    bar: float = 0.9


def apart(train: str, infer: str, batch: int, *more: str) -> tuple[str, ...]:
    """Return the settings for engines on slot 1 and all other roles on slot 0, with one update of `batch` samples."""
    sizes = {"per_device_train_batch_size": batch // 4, "gradient_accumulation_steps": 4}
    devices = (f"{train}.device_mapping=[0]", f"{infer}.device_mapping=[1]")
    return (*devices, *(f"{train}.training_args.{name}={value}" for name, value in sizes.items()), *more)


DEMO = apart("student_train", "student_infer", 256, "teacher.device_mapping=[0]", "validation.evaluate_teacher=false")
REWARDED = apart("actor_train", "actor_infer", 256)
DISTILLED = ("demo", "onpolicy_distill")
TASKS = {
    "demo": Task(PURE, DISTILLED, DEMO),
    "tail": Task(PURE, DISTILLED, (*DEMO, "workflow=slow_answers", "prompt_key=messages", "workflow_concurrency=1024")),
    "game": Task(
        AGENTIC,
        ("games", "frozen_lake"),
        apart("student_train", "student_infer", 128, "teacher.device_mapping=[0]", "validation.evaluate_teacher=false"),
        "val/env/FrozenLake/success",
        0.8,
    ),
}
SIGNALS = {
    "reverse KL": TASKS["demo"],
    "reverse KL, stored": Task(STORED, DISTILLED, DEMO),
    "forward KL": Task(PURE, DISTILLED, (*DEMO, "opd_objective=full", "opd_divergence=forward_kl")),
    "GRPO with TIS": Task(RLVR, ("demo", "rlvr"), (*REWARDED, TIS), bar=0.5),
}


def launched(task: Task, *settings: str, keep: Path | None = None) -> list[dict[str, Any]]:
    """Run a task in the directory `keep`, or in a temporary one; return the rows of its metrics.

    Exits if the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="async_table-") if keep is None else nullcontext(str(keep)) as directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "plugins").mkdir(exist_ok=True)
        (Path(directory) / "plugins" / "slow.py").write_text(SLOW_WORKFLOW)
        plugins = (f"plugin_dir={directory}/plugins",) if any("_answers" in word for word in task.settings) else ()
        config = ("--config_path", task.config[0], "--config_name", task.config[1])
        output = (f"output_dir={directory}", "exp_name=run", "save_steps=0")
        command = [sys.executable, task.launcher, *config, *output, *task.settings, *plugins, *settings]
        log = Path(directory) / "log"
        with log.open("w") as file:
            code = subprocess.call(command, stdout=file, stderr=file, cwd=ROOT)
        if code:
            sys.exit(f"{' '.join(command)}: exit code {code}\n{log.read_text()[-4000:]}")
        return [json.loads(line) for line in (Path(directory) / "run/latest/metrics.jsonl").read_text().splitlines()]


def learned(
    name: str, task: Task, bound: int, seed: int, overrides: Sequence[str], runs: Path | None
) -> dict[str, Any]:
    """Run one cell of the table, in a directory of `runs` if given; return its figures."""
    keep = runs and runs / f"{name.replace(' ', '_').replace(',', '')}-S{bound:g}-{seed}"
    settings = (f"seed={seed}", f"async_generation_ratio={bound}", "eval_steps=4", *overrides)
    rows = launched(task, *settings, keep=keep)
    found = figures(rows, task)
    return {"cell": name, "S": bound, "seed": seed, **found}


def figures(rows: Sequence[dict[str, Any]], task: Task) -> dict[str, Any]:
    """Return a run's figures: its metric, ages, effective sizes, and the step of the alarm about these."""
    curve = [(row["step"], row[task.metric]) for row in rows if task.metric in row]
    steps = [row for row in rows if row["step"]]
    alarm = DivergenceAlarm(is_itself=False)
    warned = [row["step"] for row in steps if any(text.startswith(f"{ESS}:") for text in alarm.after(row))]
    best = max(value for _, value in curve)
    return {
        "first": curve[0][1],
        "best": best,
        "last": curve[-1][1],
        "bar": task.bar,
        "steps to the bar": next((step for step, value in curve if value >= task.bar), None),
        "steps": steps[-1]["step"],
        "mean age": mean([row.get("rollout/async/age_mean", 0.0) for row in steps]),
        "least ess": min((row[ESS] for row in steps if ESS in row), default=None),
        "mean k1": mean([row[KL] for row in steps if KL in row]),
        "alarm at": warned[0] if warned else None,
        "seconds": sum(row["time/step"] - row.get("time/validate", 0.0) for row in steps),
        "curve": curve,
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with a line for each run."""
    columns = (
        "cell",
        "S",
        "seed",
        "first",
        "best",
        "last",
        "bar",
        "steps to the bar",
        "mean age",
        "least ess",
        "alarm at",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for cell in cells:
        shown = [cell[name] for name in columns]
        texts = [
            "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value) for value in shown
        ]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def speed(rows: Sequence[dict[str, Any]], bound: int) -> dict[str, float]:
    """Return means over the steps after the first tenth: seconds by part, tokens per second, ages and idle times."""
    steps = [row for row in rows if row["step"] > rows[-1]["step"] // 10 + 1]  # the steps of the simulator's mean
    parts = ("step", "generate", "teacher", "train", "weight_sync")
    found = {"S": bound, **{part: mean([row[f"time/{part}"] for row in steps]) for part in parts}}
    found["tokens/s"] = mean([row["rollout/generated_tokens"] for row in steps]) / found["step"]
    for name in ("age_mean", "learner_idle", "engines_idle"):
        found[name] = mean([row.get(f"rollout/async/{name}", 0.0) for row in steps])
    return found


def stated(answer: float) -> tuple[str, ...]:
    """Return the settings for small batches, in which the answers to a prompt take `answer` seconds on average."""
    return (
        *("workflow=stated_answers", "prompt_key=messages", f"workflow_concurrency={SLOTS}", "workflow_workers=1"),
        f"workflow_args={{seconds: [{math.log(answer) - SPREAD**2 / 2:.4f}, {SPREAD}]}}",
        *(f"rollout_batch_size={PROMPTS}", f"num_return_sequences_in_group={RUNS}"),
        f"student_train.training_args.per_device_train_batch_size={PROMPTS * RUNS // 4}",
    )


def throughput(
    bounds: Sequence[float],
    steps: int,
    overrides: Sequence[str],
    times: tuple[float, float] | None = None,
    jobs: int = 1,
) -> list[dict[str, float]]:
    """Run the demo at each bound; add to each row the ratios to the synchronous step and to its longer part.

    With `times`, the mean seconds of an answer and the seconds of a step's updates, also add the simulator's step.
    """
    off = ("validation=null", "eval_steps=0", f"max_steps={steps}", *overrides)
    demo = Task(PURE, DISTILLED, DEMO[:-1])
    if times:
        demo = Task(STATED, DISTILLED, (*demo.settings, *stated(times[0])))

    def measured(bound: int) -> dict[str, float]:
        found = speed(launched(demo, f"async_generation_ratio={bound}", *off), bound)
        print(json.dumps(found), flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(measured, bounds))
    if base := next((row for row in found if not row["S"]), None):
        longer = max(base["generate"], base["teacher"] + base["train"])
        for row in found:
            row["speed-up"] = row["tokens/s"] / base["tokens/s"]
            row["step / longer part"] = row["step"] / longer
            if times:
                row["simulated step"] = simulated(int(row["S"]), times[0], base, steps)
    return found


def simulated(bound: int, answer: float, base: dict[str, float], steps: int) -> float:
    """Return the simulator's step for stated times of answers, and the other parts of the synchronous run `base`.

    The simulator's seed is that of `TIMES` in `SLOW_WORKFLOW`, so it draws the times of the real answers.
    """
    # one call of the workflow makes all answers to a prompt
    costs = Costs(lognormal(answer, SPREAD), score=base["teacher"], learn=base["train"], sync=base["weight_sync"])
    return simulate(Pace.of(PROMPTS, bound), costs, runs=1, slots=SLOTS, batches=steps).step


def speed_table(rows: Sequence[dict[str, float]]) -> str:
    """Return the throughput as a Markdown table."""
    columns = ("S", "step", "simulated step", "tokens/s", "speed-up", "step / longer part", "age_mean", "learner_idle")
    shown = [name for name in columns if all(name in row for row in rows)]
    lines = [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(f'{row[name]:.3g}' for name in shown)} |" for row in rows)])


def svg(rows: Sequence[dict[str, float]], title: str = "demo") -> str:
    """Return a chart of the speed over S, for the bounds above 0, relative to the synchronous run."""
    ahead = [row for row in rows if row["S"]]
    lines = {name: [row[name] for row in ahead] for name in ("speed-up", "step / longer part")}
    return drawn([Panel(f"{title}: speed over S, against S = 0", [row["S"] for row in ahead], lines)], columns=1)


def write(path: Path | None, key: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), **more, key: rows}, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells of the table, or the throughput, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", nargs="+", choices=("tasks", "signals"), default=["tasks", "signals"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--bounds", type=int, nargs="+", help="default: 1 2 4; with --throughput 0 1 2 4 8")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--steps", type=int, default=24, help="of a run for the throughput (%(default)s)")
    parser.add_argument("--stated", metavar="ANSWER:LEARN", help="seconds of an answer, and of a step's updates")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, with --stated (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--svg", type=Path, metavar="OUT")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the directories of the runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configurations")
    options = parser.parse_intermixed_args(arguments)
    if options.throughput:
        times = None
        if options.stated:
            answer, learn = map(float, options.stated.split(":"))
            os.environ[SECONDS], times = str(learn), (answer, learn)
        bounds = options.bounds or [0, 1, 2, 4, 8]
        rows = throughput(bounds, options.steps, options.overrides, times, options.jobs)
        write(options.json, "throughput", rows, steps=options.steps, stated=options.stated)
        if options.svg:
            options.svg.write_text(svg(rows, "demo with stated times" if times else "demo"))
        print(speed_table(rows))
        return 0
    chosen = [(name, TASKS[name], bound) for name in options.tasks for bound in options.bounds or [1, 2, 4]]
    chosen = chosen if "tasks" in options.cells else []
    chosen += [(name, SIGNALS[name], 8.0) for name in options.signals] if "signals" in options.cells else []
    cells = json.loads(options.json.read_text())["cells"] if options.json and options.json.exists() else []
    known = {(cell["cell"], cell["S"], cell["seed"]) for cell in cells}
    for name, task, bound in chosen:
        for seed in options.seeds:
            if (name, bound, seed) not in known:
                cells.append(learned(name, task, bound, seed, options.overrides, options.runs))
                print(json.dumps({key: value for key, value in cells[-1].items() if key != "curve"}), flush=True)
                write(options.json, "cells", cells)
    print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
