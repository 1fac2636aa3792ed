"""Effect of a slow reward on the step time of the demo: a reward that sleeps for every sample, compared with one that
does not.

    python benchmarks/slow_reward.py [--seconds 0.2] [--steps 16] [--rounds 2] [--modes pure mixed] [--json OUT]
        [--at-most 1.1] [key=value ...]

Every run is started by the real launcher. Runs alternate, because a machine's speed drifts. A figure is the median over
the steps after the first three. The exit code is 1 if a ratio is above `--at-most`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from roll_opd.extras.graders.rewards.math_rule import MathRule
from roll_opd.rewards.interface import RewardSample, Scores

HERE = Path(__file__).resolve().parent
MODES = {
    "pure": ("start_onpolicy_distill_pipeline.py", "onpolicy_distill"),
    "mixed": ("start_rlvr_pipeline.py", "rlvr_opd"),
}
WARM_UP = 3  # first steps, not counted
RULE = MathRule()


def slow(samples: Sequence[RewardSample], seconds: float = 0.2) -> Scores:
    """Return the scores of math_rule after a sleep."""
    time.sleep(seconds * len(samples))
    return RULE.score(samples)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="sleep per sample (%(default)s)")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--at-most", type=float, default=1.1, help="largest allowed ratio (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    sleeping = ["rewards.math_rule.worker_cls=slow_reward.slow", f"+rewards.math_rule.seconds={options.seconds}"]
    results, worst = {}, 0.0
    print(f"{'mode':8}{'step':>8}{'with':>9}{'ratio':>8}{'waited':>9}{'latency p95':>13}")
    for mode in options.modes:
        plain: list[dict[str, float]] = []
        slowed: list[dict[str, float]] = []
        for number in range(options.rounds):
            pairs = [(plain, []), (slowed, sleeping)]
            for rows, own in pairs if number % 2 == 0 else reversed(pairs):
                rows += steps(mode, options.steps, [*own, *options.overrides])
        step, with_sleep = (statistics.median(row["time/step"] for row in rows) for rows in (plain, slowed))
        waited = statistics.median(row["time/reward"] for row in slowed)
        p95 = statistics.median(row["time/reward/math_rule/latency/p95"] for row in slowed)
        ratio = with_sleep / step
        worst = max(worst, ratio)
        print(f"{mode:8}{step:7.2f}s{with_sleep:8.2f}s{ratio:8.3f}{waited:8.2f}s{p95:12.2f}s", flush=True)
        results[mode] = {"step": step, "with": with_sleep, "ratio": ratio, "waited": waited, "latency_p95": p95}
        results[mode]["steps"] = len(plain)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"seconds": options.seconds, **results}, indent=1) + "\n")
    return int(worst > options.at_most)


def steps(mode: str, count: int, overrides: Sequence[str]) -> list[dict[str, float]]:
    """Return the metrics of the counted steps of a run."""
    script, config = MODES[mode]
    with tempfile.TemporaryDirectory(prefix="slow_reward-") as directory:
        command = [sys.executable, str(HERE.parent / "examples" / script), "--config_path", "demo"]
        command += ["--config_name", config, f"max_steps={count}", f"output_dir={directory}", "exp_name=run"]
        command += ["validation=null", "eval_steps=0", "save_steps=0", *overrides]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
        if done.returncode:
            sys.exit(f"{mode}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        rows = (Path(directory) / "run" / "latest" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, rows) if row["step"] > WARM_UP]


if __name__ == "__main__":
    sys.exit(main())
