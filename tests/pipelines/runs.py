"""Starts the real launcher in a process of its own, and reads what a run left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from roll_opd.tracking.run_directory import read_jsonl

REPOSITORY = Path(__file__).resolve().parents[2]
PURE, RLVR = "start_onpolicy_distill_pipeline.py", "start_rlvr_pipeline.py"
SECONDS = 400
MARK = "ROLL_OPD_TEST_RUN"  # in the environment of everything a run starts

# of pure distillation: fewer processes to start than the demo's own spread has, and a teacher that is tensor-parallel
SPREAD = (
    "student_train.device_mapping=[0]",
    "student_infer.device_mapping=[1]",
    "teacher.strategy_args.strategy_config.tensor_model_parallel_size=2",
)
# The demo in small: 16 prompts x 4 samples a step, nothing measured that a test does not ask for
SMALL = (
    "deterministic=true",
    "rollout_batch_size=16",
    *SPREAD,
    "student_train.training_args.gradient_accumulation_steps=1",
    "validation.data_args.file_name=examples/demo/data/val.jsonl",
    "validation.measure_teacher=false",
    "eval_steps=0",
)


@dataclass
class Run:
    """One launch: its exit code (negative: the signal that ended it), its output, its newest run directory."""

    code: int
    output: str
    path: Path
    seconds: float = 0.0  # that the launch took

    def rows(self, name: str) -> list[dict]:
        return read_jsonl(self.path / name)


def launch(
    output_dir: Path,
    *overrides: str,
    launcher: str = PURE,
    config: tuple[str, str] = ("demo", "onpolicy_distill"),
    kill_when: Callable[[], bool] | None = None,
    columns: int = 1000,
) -> Run:
    """Run the launcher to its end, or until `kill_when` says to SIGKILL it; nothing of it may be left afterwards.

    Its output is as wide as `columns`.
    """
    mark = f"{output_dir}-{time.monotonic_ns()}"
    log = output_dir.parent / f"{output_dir.name}-{time.monotonic_ns()}.log"
    command = [
        sys.executable,
        str(REPOSITORY / "examples" / launcher),
        "--config_path",
        config[0],
        "--config_name",
        config[1],
    ]
    began = time.monotonic()
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, f"output_dir={output_dir}", *overrides],
            cwd=REPOSITORY,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: mark, "COLUMNS": str(columns)},
        )
        deadline = time.monotonic() + SECONDS
        while process.poll() is None:
            if kill_when and kill_when():
                process.send_signal(signal.SIGKILL)
                process.wait()
            elif time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"no end after {SECONDS} s:\n{log.read_text()[-4000:]}")
            time.sleep(0.01)
    seconds = time.monotonic() - began
    wait_until_gone(mark)
    latest = output_dir / config[0] / "latest"
    return Run(process.returncode, log.read_text(), latest, seconds)


def wait_until_gone(mark: str, seconds: float = 10.0) -> None:
    """Fail if a process of the run with `mark` is alive after `seconds`."""
    deadline = time.monotonic() + seconds
    while left := [process.name() for process in psutil.process_iter() if _belongs(process, mark)]:
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.1)


def _belongs(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False
