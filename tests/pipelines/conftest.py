"""One stage for all tests that use it, and one preloaded server for all launchers that may be forks."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import runs
from stage import Stage, open_stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The stage, which is started by the first test that uses it and ends with the session."""
    with open_stage(tmp_path_factory.mktemp("stage")) as opened:
        yield opened


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """Launchers that a test starts are forks of one preloaded server."""
    with runs.forks():
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make file systems of a given size in MiB; the test is skipped if they cannot be mounted."""
    with ExitStack() as mounts:
        yield lambda mebibytes: mounts.enter_context(_mounted(tmp_path / f"disk_{mebibytes}", mebibytes))


@contextmanager
def _mounted(place: Path, mebibytes: int) -> Iterator[Path]:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command).returncode:
        pytest.skip("needs the right to mount a small tmpfs (root)")
    yield place
    subprocess.run(["umount", "-l", place], check=True)
