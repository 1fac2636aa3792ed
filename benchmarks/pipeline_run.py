"""Runs of the pipeline for benchmarks: started as by a user, with steps only; figures are read from metrics.jsonl."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
ENTRY = REPOSITORY / "examples" / "start_onpolicy_distill_pipeline.py"
NAME = "measured"
# only steps; the seconds of a remaining checkpoint or validation are subtracted
ONLY_STEPS = ("++validation=null", "++save_steps=0", "++eval_steps=0", f"exp_name={NAME}")
NOT_A_STEP = ("validate", "checkpoint")
STOP_SECONDS = 30
LOOK_SECONDS = 0.2


def run_pipeline(
    config_path: str,
    config_name: str,
    overrides: Sequence[str],
    directory: Path,
    look: Callable[[int], None] | None = None,
) -> list[dict[str, float]]:
    """Run the entry script with `ONLY_STEPS` and `overrides`; return the rows of its steps.

    `look` is called with the id of its process every `LOOK_SECONDS`. Exits if the run fails.
    """
    config = ["--config_path", config_path, "--config_name", config_name]
    log = directory / "log"
    with log.open("w") as output:
        command = [sys.executable, str(ENTRY), *config, *ONLY_STEPS, f"output_dir={directory}", *overrides]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            code = _ended(process, look)
        finally:
            if process.poll() is None:  # this process was interrupted: the run first ends its processes
                process.send_signal(signal.SIGINT)
                process.wait(STOP_SECONDS)
    if code:
        sys.exit(f"the pipeline ended with exit code {code}:\n{log.read_text()[-4000:]}")
    lines = (directory / NAME / "latest" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]  # step 0 is the start


# lines of a run's log with colours or in Ray's form for workers, warnings of other packages, blank lines
NOT_SHOWN = re.compile(r"\x1b\[|^\s*$|Warning: |^\s*warnings\.warn\(")


class ShownLog:
    """Prints the pipeline's lines while it runs; `look` is called repeatedly."""

    def __init__(self, log: Path, say: Callable[[str], object]) -> None:
        self._log, self._say, self._read, self._rest = log, say, 0, ""

    def look(self) -> None:
        """Print the lines written since the last call."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        *lines, self._rest = (self._rest + new.decode(errors="replace")).split("\n")
        for line in lines:
            if not NOT_SHOWN.search(line):
                self._say(line.rstrip()[:160])


def _ended(process: "subprocess.Popen[bytes]", look: Callable[[int], None] | None) -> int:
    while look:
        try:
            return process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            look(process.pid)
    return process.wait()


def pipeline_row(metrics: dict[str, float]) -> dict[str, float]:
    """Return the seconds of a line of metrics.jsonl; validation and checkpoint are subtracted from the step."""
    timed = {name: value for name, value in metrics.items() if name.startswith("time/") and name.count("/") == 1}
    seconds = {name.removeprefix("time/"): value for name, value in timed.items()}
    beside = sum(seconds.pop(name, 0.0) for name in NOT_A_STEP)
    return {**seconds, "step": seconds["step"] - beside, "tokens": metrics["rollout/generated_tokens"]}


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    from importlib.metadata import version

    versions = {name: version(name) for name in ("torch", "megatron-core", "ray")}
    cores = len(os.sched_getaffinity(0))
    return {"cores": cores, "load": os.getloadavg(), "python": platform.python_version(), "versions": versions}
