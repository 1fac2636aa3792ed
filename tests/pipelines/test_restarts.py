"""A failed command is run again from its last checkpoint: real processes, without a training run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, pathlib, signal, sys, time
from roll_opd.base.command_line import RUN_DIRECTORY_FILE, write_run_directory
from roll_opd.commands.restarts import is_attempt, restarted, restarts_left
from roll_opd.inference.failed_start import die_with_parent

if RUN_DIRECTORY_FILE in os.environ:  # as the launchers do
    die_with_parent()
place, ends = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
if not is_attempt():
    sys.exit(restarted(2))
with (place / "attempts").open("a") as file:
    file.write(" ".join([str(restarts_left()), *sys.argv[3:]]) + "\\n")
run = place / "run"
write_run_directory(run)
write_run_directory(place / "of a run that a workflow starts")
if restarts_left() < 2:  # the first fails before it has a checkpoint
    step = run / "checkpoints/step_4"
    step.mkdir(parents=True, exist_ok=True)
    (step / "run_state.json").touch()
end = ends[2 - restarts_left()]
if end == "wait":
    time.sleep(600)
if end.startswith("-"):
    os.kill(os.getpid(), -int(end))
sys.exit(int(end))
"""


def started(tmp_path: Path, ends: str) -> "subprocess.Popen[str]":
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), ends, "max_restarts=2"]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def attempts(tmp_path: Path) -> list[str]:
    return (tmp_path / "attempts").read_text().splitlines()


@pytest.mark.parametrize(
    ("ends", "code", "tries"),
    [
        pytest.param("1,0,0", 0, 2, marks=pytest.mark.nightly),
        ("-9,-11,0", 0, 3),  # killed, crashed
        pytest.param("1,-9,-9", 1, 3, marks=pytest.mark.nightly),
        ("2,0,0", 2, 1),  # what cannot work
        pytest.param("-15,0,0", 143, 1, marks=pytest.mark.nightly),  # asked to end
    ],
)
def test_a_failed_command_is_run_again_from_its_checkpoint(tmp_path: Path, ends: str, code: int, tries: int) -> None:
    process = started(tmp_path, ends)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    resumed = f" resume_from_checkpoint='{tmp_path / 'run'}'"
    assert attempts(tmp_path) == ["2 max_restarts=2", "1 max_restarts=2", f"0 max_restarts=2{resumed}"][:tries]
    assert errors.count("; restarting (") == tries - 1
    assert ("all 2 restarts (max_restarts) are used" in errors) == (code == 1)


def test_a_signal_is_passed_on_and_is_the_end(tmp_path: Path) -> None:
    process = started(tmp_path, "wait,0,0")
    deadline = time.monotonic() + 60
    while not (tmp_path / "attempts").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "attempts").exists()
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert len(attempts(tmp_path)) == 1


def test_an_attempt_ends_with_the_process_that_watches_it(tmp_path: Path) -> None:
    """No process remains if the supervisor is killed."""
    process = started(tmp_path, "wait,0,0")
    mark = str(tmp_path / "program.py")
    deadline = time.monotonic() + 60
    while not (tmp_path / "attempts").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "attempts").exists()
    process.kill()
    process.wait()
    while running(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(mark)
    process.communicate()


def running(mark: str) -> list[str]:
    lines = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(place.read_text().replace("\0", " "))
        except OSError:
            continue
    return [line for line in lines if mark in line and str(os.getpid()) not in line]
