"""Comparison of two configurations that alternate every few steps: while one runs, all processes of the other are
stopped.

The speed of a shared machine drifts by half within minutes. Turns of some seconds give both sides the same drift. A
step during which its side was stopped does not count.

    python benchmarks/in_turns.py [--steps 60] [--window 4] [--tree DIR] [--json OUT] [key=value ...] -- [key=value ...]

The settings before `--` are for the first side, the others for the second; both override the same configuration. With
`--tree`, the first side runs the code and the configurations of another checkout, with this environment's packages.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from pipeline_run import ENTRY, NAME, ONLY_STEPS, REPOSITORY, machine

WARMUP = 5  # first steps of each side, during which both sides run
ENDLESS = 100_000  # steps
END_SECONDS = 60


class Side:
    """A run that can be stopped and continued."""

    def __init__(self, options: argparse.Namespace, overrides: Sequence[str], directory: Path, tree: Path) -> None:
        config = ["--config_path", options.config_path, "--config_name", options.config_name]
        settings = [*ONLY_STEPS, f"max_steps={ENDLESS}", f"output_dir={directory}", *overrides]
        self._log, self._record = directory / "log", directory / NAME / "latest" / "metrics.jsonl"
        with self._log.open("w") as output:
            command = [sys.executable, str(tree / ENTRY.relative_to(REPOSITORY)), *config, *settings]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, cwd=tree, env=environment
            )
        self.seconds: list[float] = []  # of complete steps
        self.cpu: dict[str, float] = defaultdict(float)  # CPU seconds by kind of process
        self.steps = 0  # number of steps in which the CPU seconds were spent

    def rows(self) -> list[dict[str, float]]:
        """Return the recorded rows of its steps; exit if the run has ended."""
        if self._process.poll() is not None:
            sys.exit(f"the run ended with exit code {self._process.returncode}:\n{self._log.read_text()[-4000:]}")
        text = self._record.read_text() if self._record.exists() else ""
        lines = text.rpartition("\n")[0].splitlines()  # the last line may be incomplete
        return [row for row in map(json.loads, lines) if row["step"] > 0]

    def run(self, steps: int) -> None:
        """Continue until `steps` more are recorded, then stop."""
        before, spent = len(self.rows()), self._cpu()
        self.signal(signal.SIGCONT)
        while len(self.rows()) < before + steps:
            time.sleep(0.03)
        self.signal(signal.SIGSTOP)
        for role, seconds in self._cpu().items():
            self.cpu[role] += seconds - spent[role]
        rows = self.rows()[before:]
        self.steps += len(rows)
        # the first step was interrupted by the other side's turn
        self.seconds += [row["time/step"] for row in rows[1:]]

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        for process in self._processes():
            try:
                process.send_signal(number)
            except psutil.Error:
                continue  # it has just ended

    def end(self) -> None:
        """End the run and all its processes; it may complete its step first."""
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
                self._process.wait()

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def _cpu(self) -> dict[str, float]:
        spent: dict[str, float] = defaultdict(float)
        for process in self._processes():
            try:
                title, times = process.cmdline()[:1], process.cpu_times()
            except psutil.Error:
                continue
            role = title[0].partition(".")[0] if title and title[0].startswith("ray::") else "others"
            spent[role] += times.user + times.system
        return spent


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; return 1 if the ratio of the second side's step time to the first's is above
    `--at-most`."""
    options, sides = parse(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raise an exception, so that started processes are ended
    with started(options, sides) as both:
        while len(both[0].rows()) < WARMUP or len(both[1].rows()) < WARMUP:
            time.sleep(0.3)
        for side in both:
            side.signal(signal.SIGSTOP)
        turn = list(both)
        while min(len(side.seconds) for side in both) < options.steps:
            for side in turn:
                side.run(options.window)
            turn.reverse()
            print(f"{min(len(side.seconds) for side in both)} of {options.steps} steps a side", flush=True)
    result = {
        "sides": [
            {
                "settings": list(overrides),
                "mean": mean(side.seconds),
                "median": median(side.seconds),
                "steps": len(side.seconds),
                "cpu": {role: seconds / side.steps for role, seconds in sorted(side.cpu.items())},
            }
            for overrides, side in zip(sides, both, strict=True)
        ],
        "ratio": mean(both[1].seconds) / mean(both[0].seconds),
        "machine": machine(),
    }
    print(table(result))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(options.at_most is not None and result["ratio"] > options.at_most)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, tuple[list[str], list[str]]]:
    """Return the options, and the settings of both sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config_path", default="demo", metavar="DIR")
    parser.add_argument("--config_name", default="onpolicy_distill", metavar="NAME")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="complete steps per side")
    parser.add_argument("--window", type=int, default=4, metavar="N", help="steps of a turn, at least 2")
    parser.add_argument("--tree", type=Path, default=REPOSITORY, metavar="DIR", help="checkout of the first side")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--at-most", type=float, metavar="RATIO", help="exit with 1 if the ratio is higher")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings of the first side; after --, settings of the second side",
    )
    if "--" not in arguments:
        parser.error("write -- between the settings of the first side and those of the second")
    between = list(arguments).index("--")
    options = parser.parse_args(arguments[:between])
    if options.window < 2 or options.steps < 1:
        parser.error("--window must be at least 2, and --steps at least 1")
    return options, (options.overrides, list(arguments[between + 1 :]))


@contextmanager
def started(options: argparse.Namespace, sides: Sequence[Sequence[str]]) -> Iterator[list[Side]]:
    """Start both runs, and end them with the block."""
    with tempfile.TemporaryDirectory(prefix="in_turns-") as directory:
        both: list[Side] = []
        try:
            for number, (overrides, tree) in enumerate(zip(sides, (options.tree.resolve(), REPOSITORY), strict=True)):
                place = Path(directory, str(number))
                place.mkdir()
                both.append(Side(options, overrides, place, tree))
            yield both
        finally:
            for side in both:
                side.end()


def table(result: dict[str, Any]) -> str:
    """Return the figures as text: seconds of a step, and CPU seconds by kind of process."""
    first, second = result["sides"]
    lines = [f"\n{'seconds a step':<28}{'first':>10}{'second':>10}{'ratio':>8}", "-" * 56]
    rows = [(f"{name} of {first['steps']}", first[name], second[name]) for name in ("mean", "median")]
    rows.append(("CPU, all processes", sum(first["cpu"].values()), sum(second["cpu"].values())))
    rows += [
        (f"  {role}", first["cpu"].get(role, 0.0), second["cpu"].get(role, 0.0))
        for role in sorted({**first["cpu"], **second["cpu"]})
    ]
    for name, one, other in rows:
        lines.append(f"{name:<28}{one:>10.3f}{other:>10.3f}" + (f"{other / one:>8.3f}" if one else ""))
    return "\n".join([*lines, f"second / first = {result['ratio']:.3f}"])


if __name__ == "__main__":
    sys.exit(main())
