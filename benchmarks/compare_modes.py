"""Modes and objectives on the demo task: same models, prompts, batches and generated tokens.

    python benchmarks/compare_modes.py [--seeds 42 43 44] [--modes pure mixed grpo topk full] [--learning_rate LR]
        [--eval_steps 2] [--json OUT] [key=value ...]

`pure` trains on sampled tokens; `topk` and `full` are pure distillation with these objectives.

Every run is started by the real launcher; the table is made from the summary.json and metrics.jsonl of the runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll_opd.tracking.summary import ACCURACY

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PURE, RLVR = "start_onpolicy_distill_pipeline.py", "start_rlvr_pipeline.py"
MODES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {  # launcher, configuration, role of the student, overrides
    "pure": (PURE, "onpolicy_distill", "student_train", ()),
    "mixed": (RLVR, "rlvr_opd", "actor_train", ()),
    "grpo": (RLVR, "rlvr", "actor_train", ()),
    "topk": (PURE, "onpolicy_distill", "student_train", ("opd_objective=topk", "opd_topk=8")),
    "full": (PURE, "onpolicy_distill", "student_train", ("opd_objective=full",)),
}
GOAL = 0.8  # validation accuracy (the teacher's is 1); the table has the first step that reached it
BUDGETS = (30_000, 60_000, 120_000)  # generated tokens at which the modes are compared


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every mode with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["pure", "mixed", "grpo"])
    parser.add_argument("--learning_rate", type=float, help="replaces the learning rate of the configurations")
    parser.add_argument("--eval_steps", type=int, default=2, help="steps between two validations (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures of every run here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override keys of the configurations")
    options = parser.parse_intermixed_args(arguments)
    results = []
    for mode in options.modes:
        for seed in options.seeds:
            results.append(run(mode, seed, options.eval_steps, options.learning_rate, options.overrides))
            print(json.dumps(results[-1]), flush=True)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0


def run(mode: str, seed: int, eval_steps: int, learning_rate: float | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the launcher once; return the figures of its record."""
    script, config, trained, own = MODES[mode]
    with tempfile.TemporaryDirectory(prefix="compare_modes-") as directory:
        command = [sys.executable, str(EXAMPLES / script), "--config_path", "demo", "--config_name", config]
        settings = [f"seed={seed}", f"output_dir={directory}", "exp_name=run", f"eval_steps={eval_steps}"]
        settings += ["validation.evaluate_teacher=false", *own]
        if learning_rate is not None:
            settings.append(f"{trained}.training_args.learning_rate={learning_rate}")
        log = Path(directory) / "log"
        with log.open("w") as output:
            code = subprocess.call([*command, *settings, *overrides], stdout=output, stderr=output)
        if code:
            sys.exit(f"{mode}, seed {seed}: exit code {code}\n{log.read_text()[-4000:]}")
        latest = Path(directory) / "run" / "latest"
        summary = json.loads((latest / "summary.json").read_text())
        rows = [json.loads(line) for line in (latest / "metrics.jsonl").read_text().splitlines()]
    tokens, seconds, curve = 0.0, 0.0, []
    for row in rows:
        tokens += row.get("rollout/generated_tokens", 0.0)
        if row["step"]:
            seconds += row["time/step"] - row.get("time/validate", 0.0) - row.get("time/checkpoint", 0.0)
        if ACCURACY in row:
            curve.append((row["step"], int(tokens), round(seconds, 2), row[ACCURACY]))
    return {
        "mode": mode,
        "seed": seed,
        "accuracy_first": summary["val_accuracy_first"],
        "accuracy_last": summary["val_accuracy_last"],
        "curve": curve,  # (steps, generated tokens and seconds so far, without validation; validation accuracy)
        "steps": summary["steps"],
        "generated_tokens": summary["generated_tokens"],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table, one line per run; between two validations the accuracy of the earlier one is used."""
    lines = [
        f"| mode | seed | before | {' | '.join(f'at {budget:,} tokens' for budget in BUDGETS)} "
        f"| at the end | steps to {GOAL:g} | tokens | seconds | tokens in all |",
        "|---" * (len(BUDGETS) + 8) + "|",
    ]
    for r in results:
        at = [max(point for point in r["curve"] if point[1] <= budget)[-1] for budget in BUDGETS]
        first = next((point for point in r["curve"] if point[-1] >= GOAL), None)
        reached = f"{first[0]} | {first[1]:,} | {first[2]:.1f}" if first else "not reached | - | -"
        lines.append(
            f"| {r['mode']} | {r['seed']} | {r['accuracy_first']:.3f} | {' | '.join(f'{value:.3f}' for value in at)} "
            f"| {r['accuracy_last']:.3f} | {reached} | {r['generated_tokens']:,} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
