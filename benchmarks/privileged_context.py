"""Effect of a hint to the teacher, and collapse of self-distillation: the demo of docs/teacher-context.md.

    python benchmarks/privileged_context.py [--seeds 42 43 44] [--modes frozen sampled ...] [--steps 40]
        [--json benchmarks/results/privileged_context.json]

Every run starts the real launcher with examples/demo/hints.yaml, whose student and teacher have the same initial model.
Its record has the student's accuracy and the alarms.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll_opd.extras.alarm.divergence_alarm import AGREEMENT, ENTROPY, LENGTH, READ, REWARD
from roll_opd.tracking.summary import ACCURACY

LAUNCHER = Path(__file__).resolve().parent.parent / "examples" / "start_onpolicy_distill_pipeline.py"
HINTLESS = ("teacher.hint=null", "allow_self_teacher=true")
SAMPLED = ("opd_objective=sampled", "opd_divergence=reverse_kl")
MODES: dict[str, tuple[str, ...]] = {
    "frozen": (),  # no overrides
    "frozen, no hint": HINTLESS,
    "frozen, sampled tokens": SAMPLED,
    "lagged, every 10 steps": ("+teacher.follows_student={update_interval: 10}",),
    "average, decay 0.99": ("+teacher.follows_student={ema_decay: 0.99}",),
    "average, decay 0.98": ("+teacher.follows_student={ema_decay: 0.98}",),
    "live": ("+teacher.follows_student={}",),
    "live, a hint that is always the same": ("+teacher.follows_student={}", 'teacher.hint="000"'),
}
SHORT = {REWARD: "reward", ENTROPY: "entropy", LENGTH: "length", AGREEMENT: "agreement"}
GOAL = 0.8  # validation accuracy; the table has the first step that reached it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every mode with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures of every run here")
    options = parser.parse_args(arguments)
    results = []
    for mode in options.modes:
        for seed in options.seeds:
            results.append(run(mode, seed, options.steps))
            print(json.dumps(results[-1]), flush=True)
            if options.json:
                options.json.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")
    print(table(results))
    return 0


def run(mode: str, seed: int, steps: int) -> dict[str, Any]:
    """Run the launcher once; return the figures of its record."""
    with tempfile.TemporaryDirectory(prefix="privileged-context-") as directory:
        command = [sys.executable, str(LAUNCHER), "--config_path", "demo", "--config_name", "hints"]
        settings = [f"seed={seed}", f"output_dir={directory}", "exp_name=run", f"max_steps={steps}", *MODES[mode]]
        log = Path(directory) / "log"
        with log.open("w") as output:
            code = subprocess.call([*command, *settings], stdout=output, stderr=output)
        if code:
            sys.exit(f"{mode}, seed {seed}: exit code {code}\n{log.read_text()[-4000:]}")
        latest = Path(directory) / "run" / "latest"
        summary = json.loads((latest / "summary.json").read_text())
        rows = [json.loads(line) for line in (latest / "metrics.jsonl").read_text().splitlines()]
    return {
        "mode": mode,
        "seed": seed,
        "bare_teacher_accuracy": summary["teacher_val_accuracy"],
        "curve": [(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row],
        "alarms": [name for name in READ for text in summary["warnings"] if text.startswith(f"{name}: ")],
        "steps": summary["steps"],
        **{name: [round(row[name], 4) for row in rows[1:]] for name in READ},
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table, one line per run."""
    lines = [
        f"| teacher | seed | bare | before | best | at the end | steps to {GOAL:g} | alarms |",
        "|---" * 8 + "|",
    ]
    for r in results:
        accuracies = [accuracy for _, accuracy in r["curve"]]
        reached = next((step for step, accuracy in r["curve"] if accuracy >= GOAL), "not reached")
        alarms = ", ".join(SHORT[name] for name in r["alarms"]) or "none"
        lines.append(
            f"| {r['mode']} | {r['seed']} | {r['bare_teacher_accuracy']:.3f} | {accuracies[0]:.3f} |"
            f" {max(accuracies):.3f} | {accuracies[-1]:.3f} | {reached} | {alarms} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
