"""Seconds from the start of the demo until its first step is recorded, with and without the fork server, in turns.

    python benchmarks/start_up.py [--turns 2] [--json OUT] [key=value ...]

Each run is added to OUT when it has ended, with the load of the machine at its start.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pipeline_run import NAME, machine, run_pipeline

from roll_opd.cluster.forkserver.forkserver_start import PRELOAD

SIDES = {"with": "1", "without": "0"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the sides in turns, and print the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    runs = json.loads(options.json.read_text())["runs"] if options.json and options.json.exists() else []
    for turn in range(len(runs), options.turns * len(SIDES)):
        side = list(SIDES)[turn % len(SIDES)]
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as directory:
            seconds = seconds_to_first_step(SIDES[side], options.overrides, Path(directory))
        runs.append({"fork server": side, "seconds": round(seconds, 1), "load at the start": round(load, 1)})
        print(json.dumps(runs[-1]), flush=True)
        if options.json:
            found = {"machine": machine(), "settings": options.overrides, "runs": runs}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    for side in SIDES:
        print(f"{side:8} the fork server: {mean(run['seconds'] for run in runs if run['fork server'] == side):.1f} s")


def seconds_to_first_step(preload: str, overrides: Sequence[str], directory: Path) -> float:
    """Run the demo for one step, and return the seconds until the step was recorded."""
    os.environ[PRELOAD] = preload
    file, recorded = directory / NAME / "latest" / "metrics.jsonl", list[float]()

    def look(_: Any) -> None:
        if not recorded and file.exists() and '"step": 1' in file.read_text():
            recorded.append(time.monotonic())

    began = time.monotonic()
    run_pipeline("demo", "onpolicy_distill", ["max_steps=1", *overrides], directory, look)
    return recorded[0] - began


if __name__ == "__main__":
    main()
