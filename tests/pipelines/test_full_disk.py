"""Errors of a full disk are recognized: real writers on a small file system."""

import asyncio
import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ray.exceptions
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from roll_opd.base import hub
from roll_opd.base.failures import full_disk
from roll_opd.commands.exit_codes import exit_code
from roll_opd.config.plan import CheckpointPlan
from roll_opd.pipelines.checkpoints import CheckpointError, Checkpoints
from roll_opd.tracking.metrics_writer import MetricsWriter
from roll_opd.tracking.run_directory import RunDirectory, write_atomic
from tests.hub_server import serve

BYTES = 8 * 2**20  # more than there is room for


@pytest.fixture
def disk(small_disk: Callable[[int], Path]) -> Path:
    """A file system of 2 MiB."""
    return small_disk(2)


def _numbers() -> torch.Tensor:
    return torch.zeros(BYTES, dtype=torch.uint8)


WRITERS: dict[str, Callable[[Path], object]] = {
    "bytes": lambda place: (place / "a").write_bytes(bytes(BYTES)),
    "text": lambda place: write_atomic(place / "a", "a" * BYTES),
    "rows": lambda place: RunDirectory(place).append_jsonl("rows.jsonl", [{"a": "a" * BYTES}]),
    "torch": lambda place: torch.save(_numbers(), place / "a"),
    "safetensors": lambda place: save_file({"a": _numbers()}, place / "a"),
    "torch's checkpoints": lambda place: dcp.save(
        {"a": _numbers()}, storage_writer=dcp.FileSystemWriter(place, sync_files=True), no_dist=True
    ),
    "numpy": lambda place: np.save(place / "a", _numbers().numpy()),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_errors_of_all_writers_are_recognized(disk: Path, writer: str) -> None:
    with pytest.raises(BaseException) as raised:
        WRITERS[writer](disk)
    said = full_disk(raised.value, disk)
    assert said and said.startswith(f"the disk is full: the file system of {disk}")
    assert " of 2 MiB free" in said


@pytest.mark.parametrize("writer", ["torch", "torch's checkpoints", "safetensors", "rows"])
@pytest.mark.parametrize("later", [False, True])
def test_a_checkpoint_on_a_full_disk_is_reported_and_removed(disk: Path, writer: str, later: bool) -> None:
    run = RunDirectory(disk)
    run.checkpoints.mkdir()
    checkpoints = Checkpoints(run, CheckpointPlan(save_steps=1, async_save=later), last_step=1)

    async def save(directory: Path) -> None:
        (directory / "state").mkdir()
        try:
            WRITERS[writer](directory / "state")
        except BaseException as error:  # torch's is no Exception; a rank's comes as one, with its text
            raise RuntimeError(str(error)) from None

    with pytest.raises(CheckpointError) as raised:
        asyncio.run(checkpoints.write(1, save, {}))  # type: ignore[arg-type]
    said = str(raised.value)
    assert f"step 1 could not be written below {run.checkpoints}: the disk is full: the file system of {disk}" in said
    assert "of 2 MiB free" in said and "Free space, lower max_ckpt_to_keep or change output_dir" in said
    assert list(run.checkpoints.iterdir()) == []


def test_a_full_disk_is_found_in_the_errors_of_other_processes(disk: Path) -> None:
    """Only their text is available."""
    program = (
        f"open({str(disk / 'a')!r}, 'wb', 0).write(bytes({2**21})); open({str(disk / 'b')!r}, 'wb', 0).write(b'1')"
    )
    lines = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr
    assert "No space left" in lines
    error = ray.exceptions.RayTaskError("save", lines, RuntimeError("a rank failed"))
    assert f"the file system of {disk} has 0 of 2 MiB free" in str(full_disk(error, disk))
    try:
        try:
            raise error
        except ray.exceptions.RayTaskError as first:
            raise RuntimeError("the student's process has failed") from first
    except RuntimeError as second:
        assert full_disk(second, disk, Path("/")) == full_disk(error, disk)


def test_other_errors_are_not_put_down_to_the_disk(disk: Path) -> None:
    for error in (
        OSError(errno.EACCES, "Permission denied", "a"),
        RuntimeError("PytorchStreamWriter failed writing file data/0"),
        ValueError("step 28"),
    ):
        assert full_disk(error, Path("/proc")) is None or "PytorchStreamWriter" in str(error)
    assert full_disk(RuntimeError("PytorchStreamWriter failed"), Path(__file__).parent) is None
    assert full_disk(ray.exceptions.OutOfDiskError("an object"), disk)
    assert full_disk(ExceptionGroup("two", [ValueError("a"), OSError(errno.ENOSPC, "No space")]), disk)
    assert "quota" in str(full_disk(OSError(errno.EDQUOT, "Disk quota exceeded"), disk))


def test_a_file_system_without_inodes_is_named(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=3", disk], check=True)
    with pytest.raises(OSError, match="No space left") as raised:
        for number in range(5):
            (disk / str(number)).touch()
    assert f"the file system of {disk / '2'} has no free inodes" in str(full_disk(raised.value))


def test_metrics_and_the_exit_code(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "full").write_bytes(bytes(2**21 - 2**13))
    run = RunDirectory(disk)
    trackers = MetricsWriter.open((), run)
    trackers.log(1, {f"metric/{number}": 1.0 for number in range(2000)})
    trackers.close()
    said = " ".join(capsys.readouterr().err.split())
    assert f"metrics.jsonl cannot be written at step 1: the disk is full: the file system of {run.metrics_file}" in said
    with pytest.raises(OSError) as raised:
        run.append_jsonl("samples.jsonl", [{"a": "a" * 2**14}])
    assert exit_code(raised.value) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"the file system of {disk / 'samples.jsonl'} has 0 of 2 MiB free; free space or change output_dir" in said


def test_a_download_states_the_full_disk(
    small_disk: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space is there when the run looks, and is used up while the client writes."""
    repository, disk = tmp_path / "hub" / "models" / "org" / "model", small_disk(2)
    repository.mkdir(parents=True)
    for name, size in (("config.json", 2), ("model.safetensors", 2**23)):
        (repository / name).write_bytes(b"{}" + bytes(size - 2))
    monkeypatch.setenv("HF_HOME", str(disk))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(hub, "free_space", lambda path: 2**40)
    with serve(tmp_path / "hub") as server, hub.downloading(print):
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(
            hub.HubError, match=r"org/model: the disk of .* is full .* HF_HOME .* complete files are kept"
        ):
            hub.fetch(hub.HubName("model", "org/model"), lambda files: files)
    assert (hub.cached(hub.HubName("model", "org/model")) or disk / "none").joinpath("config.json").is_file()
