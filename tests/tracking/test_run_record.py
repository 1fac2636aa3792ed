"""The run directory and the summary of a run, also after a kill and a resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from roll_opd.base.failures import ConfigError
from roll_opd.tracking.phase_clock import PHASES
from roll_opd.tracking.run_directory import (
    METRICS,
    PROMPTS,
    SAMPLES,
    STEP_FILES,
    RunDirectory,
    complete_checkpoints,
    lock_run,
    read_jsonl,
    to_json,
)
from roll_opd.tracking.summary import summarize, write_summary


def test_latest_is_the_newest_run_with_a_step(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path, "exp")
    second = RunDirectory.create(tmp_path, "exp")
    latest = tmp_path / "exp" / "latest"
    assert not latest.is_symlink()
    second.link_latest()
    RunDirectory.create(tmp_path, "exp").discard()
    assert not os.path.isabs(os.readlink(latest))
    assert latest.resolve() == second.path.resolve()
    assert set(RunDirectory.runs(tmp_path, "exp")) == {first.path, second.path}
    RunDirectory.resume(first.path, step=0)
    assert latest.resolve() == first.path.resolve()
    assert RunDirectory.runs(tmp_path, "none") == []
    assert sorted(os.listdir(tmp_path / "exp")) == sorted([first.path.name, second.path.name, "latest"])


def test_a_real_latest_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "exp" / "latest").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="move this path away"):
        RunDirectory.create(tmp_path, "exp")


def test_resume_cuts_back_to_the_step(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "exp")
    run.link_latest()
    for name in STEP_FILES:
        run.append_jsonl(name, [{"step": step, "x": step / 2} for step in (1, 2, 2, 3)])
    with (run.path / SAMPLES).open("a") as file:
        file.write('{"step": 1, "tex')  # killed while writing
    again = RunDirectory.resume(tmp_path / "exp" / "latest", step=2)
    assert again.path == run.path.resolve()
    for name in STEP_FILES:
        assert [row["step"] for row in read_jsonl(run.path / name)] == [1, 2, 2]
        assert (run.path / name).read_text().endswith("\n")
    again.append_jsonl(PROMPTS, [{"step": 3}])
    assert len(read_jsonl(run.path / PROMPTS)) == 4
    with pytest.raises(FileNotFoundError, match="no run at"):
        RunDirectory.resume(tmp_path / "nowhere", step=0)


def test_a_resume_renames_later_checkpoints(tmp_path: Path) -> None:
    """The run continues from step 2, so neither `newest` nor `max_ckpt_to_keep` may count the later checkpoints."""
    run = RunDirectory.create(tmp_path, "exp")
    for attempt in (1, 2):
        for step in (2, 9, 10):
            run.checkpoint(step).mkdir(parents=True, exist_ok=True)
            (run.checkpoint(step) / "run_state.json").write_text(f"{attempt}")
        again = RunDirectory.resume(run.path, step=2)
        names = [f"superseded_step_{step}.{attempt}" for step in (10, 9)]
        assert [path.name for path in again.set_aside] == names
        assert all((path / "run_state.json").read_text() == f"{attempt}" for path in again.set_aside)
        assert complete_checkpoints(run.path) == [run.checkpoint(2)]
    assert RunDirectory.resume(run.path, step=2).set_aside == ()


HOLDS = """
import os, sys, time
from pathlib import Path
from roll_opd.tracking.run_directory import lock_run
with lock_run(Path(sys.argv[1])):
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def test_a_run_has_one_driver(tmp_path: Path) -> None:
    """Until the driver has ended, in any way."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pid = first.stdout.readline().strip()
        with pytest.raises(ConfigError, match=rf"a run that is still running \(process {pid} on "):
            with lock_run(tmp_path):
                pass
        first.kill()
    for _ in range(2):
        with lock_run(tmp_path):
            assert f"process {os.getpid()} on" in (tmp_path / ".driver").read_text()


FULL_DISK = """
import resource, sys
from pathlib import Path
from roll_opd.tracking.run_directory import RunDirectory

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

run = RunDirectory(Path(sys.argv[1]))
run.append_jsonl("metrics.jsonl", [{"step": 1}])
size = run.metrics_file.stat().st_size
for room in (0, 5, 25):  # no byte, half a row, one row and half of the next
    limit(size + room)
    try:
        run.append_jsonl("metrics.jsonl", [{"step": 2, "x": "é" * 3}, {"step": 2, "x": "é" * 9000}])
        sys.exit("the disk was not full")
    except OSError:
        pass
limit(resource.RLIM_INFINITY)
run.append_jsonl("metrics.jsonl", [{"step": 3}])
"""


def test_a_row_after_a_full_disk_is_whole(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], check=True)  # its limit is that process's alone
    assert (tmp_path / METRICS).read_text() == '{"step": 1}\n{"step": 3}\n'


def test_json_lines_are_strict_json() -> None:
    row = {
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "array": np.arange(2),
        "scalar": np.int64(3),
        "flag": np.bool_(True),
        "path": Path("a"),
        "nested": ({"x": np.float64(0.5)},),
    }
    expected = {
        "nan": None,
        "inf": None,
        "array": [0, 1],
        "scalar": 3,
        "flag": True,
        "path": "a",
        "nested": [{"x": 0.5}],
    }
    assert json.loads(to_json(row), parse_constant=pytest.fail) == expected


def step_row(step: int) -> dict[str, float]:
    row = {
        "step": step,
        "opd/reverse_kl/mean": 2.0 - step / 20,
        "rollout/generated_tokens": 10.0,
        "time/step": 2.0,
    }
    row.update({f"time/{phase}": 0.25 for phase in PHASES})
    return row


def test_the_summary_of_a_resumed_run_is_that_of_a_whole_one(tmp_path: Path) -> None:
    whole = RunDirectory.create(tmp_path, "whole")
    whole.append_jsonl(METRICS, [{"step": 0, "val_correct/all/mean": 0.1, "val_correct/teacher/mean": 0.9}])
    whole.append_jsonl(METRICS, [step_row(step) for step in range(1, 31)])
    whole.append_jsonl(METRICS, [{"step": 30, "val_correct/all/mean": 0.8}])

    parts = RunDirectory.create(tmp_path, "parts")
    parts.append_jsonl(METRICS, [{"step": 0, "val_correct/all/mean": 0.1, "val_correct/teacher/mean": 0.9}])
    parts.append_jsonl(METRICS, [step_row(step) for step in range(1, 19)])
    parts = RunDirectory.resume(parts.path, step=15)
    parts.append_jsonl(METRICS, [step_row(step) for step in range(16, 31)])
    parts.append_jsonl(METRICS, [{"step": 30, "val_correct/all/mean": 0.8}])

    summary = write_summary(whole, seed=5)
    assert summary == write_summary(parts, seed=5) == json.loads(whole.summary_file.read_text())
    assert set(summary) == {
        "val_accuracy_first",
        "val_accuracy_last",
        "teacher_val_accuracy",
        "reverse_kl_first",
        "reverse_kl_last",
        "steps",
        "generated_tokens",
        "wall_seconds",
        "startup_seconds",
        "warnings",
        "phase_seconds",
        "seed",
        "versions",
    }
    accuracies = (
        summary["val_accuracy_first"],
        summary["val_accuracy_last"],
        summary["teacher_val_accuracy"],
    )
    assert accuracies == (0.1, 0.8, 0.9)
    assert summary["reverse_kl_first"] == pytest.approx(np.mean([2.0 - step / 20 for step in (1, 2, 3)]))
    assert summary["reverse_kl_last"] == pytest.approx(np.mean([2.0 - step / 20 for step in (28, 29, 30)]))
    timed = write_summary(whole, seed=5, startup_parts={"Ray": 4.00049, "free slots": 0.0004})
    assert timed == summary | {"startup_parts": {"Ray": 4.0}}
    assert (summary["steps"], summary["generated_tokens"], summary["wall_seconds"]) == (30, 300, 60.0)
    assert summary["phase_seconds"]["train"] == 7.5
    assert set(summary["phase_seconds"]) == {*PHASES, "other"}
    assert set(summary["versions"]) == {"python", "torch", "vllm", "megatron-core", "ray", "transformers"}
    assert summary["versions"]["transformers"]


def test_metrics_without_a_value_are_null() -> None:
    summary = summarize([])
    assert summary["val_accuracy_first"] is summary["teacher_val_accuracy"] is summary["reverse_kl_last"] is None
    assert (summary["steps"], summary["generated_tokens"], summary["wall_seconds"]) == (0, 0, 0)
    one = summarize([{"step": 1, "opd/reverse_kl/mean": 3.0}, {"step": 2, "opd/reverse_kl/mean": None}])
    assert (one["reverse_kl_first"], one["reverse_kl_last"]) == (3.0, 3.0)
