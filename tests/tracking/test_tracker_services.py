"""The packages of W&B, SwanLab, Trackio and MLflow without a network: their files on disk, an unreachable server."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_opd.tracking.metrics_writer import MetricsWriter
from roll_opd.tracking.run_directory import RunDirectory, read_jsonl

EXTRA = "an optional tracker: pip install 'roll_opd[{}]'"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Return a run without any login."""
    for name in os.environ:
        if name.startswith(("WANDB_", "SWANLAB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = RunDirectory.create(tmp_path, "exp")
    run.write_config("seed: 3\nstudent_train:\n  model_args: {dtype: fp32}\n")
    return run


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Accepts every connection and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def log_and_resume(run: RunDirectory, tracker: str, args: dict | None = None) -> None:
    """Steps 1 and 2, then step 3 of the resumed run."""
    for resume_step, steps in ((None, (1, 2)), (2, (3,))):
        trackers = MetricsWriter.open((tracker,), run, resume_step, {tracker: args or {}})
        for step in steps:
            trackers.log(step, {"opd/x": step / 2, "val_correct/all/pass@4": 0.5})
        assert trackers.names == ("jsonl", tracker)
        trackers.close()


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Records of a file of less than one 32 KiB block: after 7 bytes of file header, each has 4 bytes of checksum,
    2 of length and 1 of type in front.
    """
    at = 7
    while at < len(data):
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        yield data[at + 7 : at + 7 + length]
        at += 7 + length


def offline_values(data: bytes) -> Iterator[tuple[int, float]]:
    """Steps and values of `opd/x` in a file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    for content in leveldb_records(data):
        record = wandb_internal_pb2.Record.FromString(content)
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "opd/x" in items:
            yield record.history.step.num, float(items["opd/x"])


def test_wandb_offline(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb", reason=EXTRA.format("wandb"))
    log_and_resume(run, "wandb", {"project": "p", "tags": ("a",), "notes": "n"})
    identity = (run.path / "tracker_ids" / "wandb").read_text().strip()
    files = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    deadline, values = time.monotonic() + 30, []
    while len(values) < 3 and time.monotonic() < deadline:  # wandb's service writes the end after `finish`
        time.sleep(0.1)
        values = [value for file in files for value in offline_values(file.read_bytes())]
    assert values == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert "warning" not in capfd.readouterr().err


def test_swanlab_offline(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("swanlab", reason=EXTRA.format("swanlab"))
    log_and_resume(run, "swanlab", {"project": "p", "experiment_name": "e", "tags": ("a",)})
    identity = (run.path / "tracker_ids" / "swanlab").read_text().strip()
    files = list((run.path / "swanlab").rglob(f"run-{identity}.swanlab"))
    assert files and all(b"opd/x" in file.read_bytes() for file in files)
    assert "warning: tracker" not in capfd.readouterr().err


def test_trackio_in_the_run_directory(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trackio", reason=EXTRA.format("trackio"))
    program = (
        "import pathlib, sys; sys.path[:] = eval(sys.argv[2])\n"
        "import test_tracker_services as t\n"
        "t.log_and_resume(t.RunDirectory(pathlib.Path(sys.argv[1])), 'trackio')"
    )
    command = [sys.executable, "-c", program, str(run.path), repr(sys.path)]  # Trackio reads its directory at import
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "warning: tracker" not in done.stderr, done.stderr
    [file] = (run.path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
        [config] = database.execute("select config from configs").fetchall()
    values = [(name, step, json.loads(metrics)["opd/x"]) for name, step, metrics in rows]
    assert values == [(run.path.name, step, step / 2) for step in (1, 2, 3)]
    assert json.loads(config[0])["seed"] == 3


def test_mlflow_in_the_run_directory(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    for module in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(module, reason=EXTRA.format("mlflow"))
    from mlflow.tracking import MlflowClient

    log_and_resume(run, "mlflow", {"run_name": "r", "tags": {"a": "b"}})
    client = MlflowClient(f"sqlite:///{run.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("exp")
    [found] = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status, found.data.tags["a"]) == ("r", "FINISHED", "b")
    assert found.data.params == {"seed": "3", "student_train.model_args.dtype": "fp32"}
    history = client.get_metric_history(found.info.run_id, "opd/x")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert found.data.metrics["val_correct/all/pass_at_4"] == 0.5
    assert "warning: tracker" not in capfd.readouterr().err


DRIVER = """
import sys, time
from roll_opd.tracking.metrics_writer import TrackerTimeouts
from roll_opd.tracking.run_directory import RunDirectory
from roll_opd.tracking.metrics_writer import MetricsWriter

run = RunDirectory(__import__("pathlib").Path(sys.argv[1]))
args = {"api_key": "0" * 40, "base_url": sys.argv[2], "settings": {"init_timeout": float(sys.argv[3])}}
timeouts = TrackerTimeouts(opening=1.0, silence=1.0, closing=float(sys.argv[4]))
trackers = MetricsWriter.open(("wandb",), run, args={"wandb": args}, timeouts=timeouts)
for step in range(1, 21):
    began = time.monotonic()
    trackers.log(step, {"x": 1.0})
    assert time.monotonic() - began < 0.5
    time.sleep(0.1)
trackers.close()
"""


@pytest.mark.parametrize(
    ("init_timeout", "closing", "words"),
    [(6, 1, "has not started after 1 s"), (3, 20, "tracker wandb continues offline")],
)
def test_wandb_online_with_a_server_that_never_answers(
    run: RunDirectory, silent_server: str, init_timeout: int, closing: int, words: str
) -> None:
    pytest.importorskip("wandb", reason=EXTRA.format("wandb"))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(run.path), silent_server, str(init_timeout), str(closing)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert words in done.stderr
    assert [row["step"] for row in read_jsonl(run.metrics_file)] == list(range(1, 21))
    assert time.monotonic() - began < 60
    if init_timeout < closing:
        [file] = (run.path / "wandb").glob("offline-run-*/*.wandb")
        assert file.stat().st_size > 1000
