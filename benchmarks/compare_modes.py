"""Pure distillation, mixed mode and plain GRPO on the demo task: same models, prompts, batches and number of steps.

    python benchmarks/compare_modes.py [--seeds 42 43 44] [--modes pure mixed grpo] [--json OUT] [key=value ...]

Every run is the real launcher; the table is made of the runs' summary.json and metrics.jsonl.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODES = {
    "pure": ("start_onpolicy_distill_pipeline.py", "onpolicy_distill"),
    "mixed": ("start_rlvr_pipeline.py", "rlvr_opd"),
    "grpo": ("start_rlvr_pipeline.py", "rlvr"),
}
GOAL = 0.8  # validation accuracy; the table says after how many steps it was first seen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every mode with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures of every run here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configurations")
    options = parser.parse_intermixed_args(arguments)
    results = []
    for mode in options.modes:
        for seed in options.seeds:
            results.append(run(mode, seed, options.overrides))
            print(json.dumps(results[-1]), flush=True)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0


def run(mode: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """One run of the launcher: what its record says."""
    script, config = MODES[mode]
    with tempfile.TemporaryDirectory(prefix="compare_modes-") as directory:
        command = [sys.executable, str(EXAMPLES / script), "--config_path", "demo", "--config_name", config]
        settings = [f"seed={seed}", f"output_dir={directory}", "exp_name=run", "validation.measure_teacher=false"]
        log = Path(directory) / "log"
        with log.open("w") as output:
            code = subprocess.call([*command, *settings, *overrides], stdout=output, stderr=output)
        if code:
            sys.exit(f"{mode}, seed {seed}: exit code {code}\n{log.read_text()[-4000:]}")
        latest = Path(directory) / "run" / "latest"
        summary = json.loads((latest / "summary.json").read_text())
        rows = [json.loads(line) for line in (latest / "metrics.jsonl").read_text().splitlines()]
    reached = [row["step"] for row in rows if row.get("val_correct/all/mean", 0.0) >= GOAL]
    return {
        "mode": mode,
        "seed": seed,
        "accuracy_first": summary["val_accuracy_first"],
        "accuracy_last": summary["val_accuracy_last"],
        "steps_to_goal": reached[0] if reached else None,
        "steps": summary["steps"],
        "generated_tokens": summary["generated_tokens"],
        "wall_seconds": round(summary["wall_seconds"], 1),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, a line a run."""
    lines = [
        f"| mode | seed | accuracy before | after | steps to {GOAL:g} | steps | generated tokens | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        reached = "not reached" if r["steps_to_goal"] is None else r["steps_to_goal"]
        lines.append(
            f"| {r['mode']} | {r['seed']} | {r['accuracy_first']:.3f} | {r['accuracy_last']:.3f} | {reached} "
            f"| {r['steps']} | {r['generated_tokens']:,} | {r['wall_seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
