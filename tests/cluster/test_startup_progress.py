"""Start-up: the current wait is printed, and late or failed parts are reported with a reason. Starts no process."""

import asyncio
import os
import time
from pathlib import Path

import pytest
import ray

from roll_opd.cluster import startup_progress
from roll_opd.cluster.lost_processes import ClusterError
from roll_opd.cluster.startup_progress import StartupProgress


def test_awaited_parts_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_progress, "STATUS_INTERVAL_S", 0.05)
    said: list[str] = []
    starting = StartupProgress(say=said.append)

    async def both() -> None:
        await asyncio.gather(
            starting.of("student", asyncio.sleep(0.2)), starting.of("teacher", asyncio.sleep(0.6, "here"))
        )

    asyncio.run(both())
    assert any("waiting for student, teacher" in line for line in said)
    assert said[-1].endswith("waiting for teacher")
    done = len(said)
    time.sleep(0.2)
    assert len(said) == done  # nothing is waited for any more
    with starting.waiting_for("a call that blocks"):
        time.sleep(0.2)
    assert said[-1].endswith("waiting for a call that blocks")
    assert list(starting.parts) == ["student", "teacher", "a call that blocks"]
    assert 0.2 <= starting.parts["student"] < 0.6 <= starting.parts["teacher"]


def test_a_timeout_reports_the_last_error_of_a_process(tmp_path: Path) -> None:
    starting = StartupProgress(0.05)
    starting.logs = tmp_path
    (tmp_path / "worker-1a-01000000-77.err").write_text(
        "INFO nothing\nTraceback (most recent call last):\n  File 'x'\nOSError: [Errno 5] the cause\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n  File 'y'\nRuntimeError: what follows\n"
    )
    with pytest.raises(
        ClusterError, match=r"teacher: has not started after 0.05 s .startup_timeout_s.*\[Errno 5\] the cause"
    ):
        asyncio.run(starting.of("teacher", asyncio.sleep(5)))


async def _failing(error: Exception) -> None:
    raise error


def test_a_failure_reports_its_cause() -> None:
    cause = ValueError("heads do not fit\nby far")
    error = ray.exceptions.RayTaskError("setup", "Traceback ...", cause)
    with pytest.raises(ClusterError, match=r"student: does not start: ValueError: heads do not fit by far$"):
        asyncio.run(StartupProgress(9.0).of("student", _failing(error)))
    # as Ray raises it: an instance of both, and one that is a TimeoutError is not taken for the limit's
    late = ray.exceptions.RayTaskError("setup", "Traceback ...", TimeoutError("of the store")).as_instanceof_cause()
    with pytest.raises(ClusterError, match="does not start: TimeoutError: of the store"):
        asyncio.run(StartupProgress(9.0).of("student", _failing(late)))


def test_a_dead_process_is_reported_with_its_log(tmp_path: Path) -> None:
    starting = StartupProgress()
    starting.logs = tmp_path
    (tmp_path / f"worker-1a-01000000-{os.getpid()}.err").write_text(
        "Traceback (most recent call last):\n  File 'x'\nImportError: libcuda.so.1: cannot open shared object file\n"
    )
    died = ray.exceptions.RayActorError(
        error_msg=f"The actor died.\n\tpid: {os.getpid()}\nWorker exit detail: end of file."
    )
    with pytest.raises(ClusterError, match=r"does not start: ImportError: libcuda\.so\.1: cannot open"):
        asyncio.run(starting.of("student", _failing(died)))
