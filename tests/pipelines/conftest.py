"""One stage for all tests that use it, and one preloaded server for all launchers that may be forks."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import runs
from plugin_sources import GAMES, GUIDE
from stage import Stage, open_stage

from tests.pages import blocks


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


@pytest.fixture(scope="session")
def games(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the setting for a user's environments."""
    place = tmp_path_factory.mktemp("games")
    (place / "my_games.py").write_text(GAMES)
    return f"plugin_dir={place}"


@pytest.fixture(scope="session")
def mine(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the settings of a user's workflows, and of rows for them."""
    place = tmp_path_factory.mktemp("mine")
    (place / "plugins").mkdir()
    (place / "plugins" / "guide_workflows.py").write_text(GUIDE)
    (place / "plugins" / "sums.py").write_text(blocks("workflows.md", "python")[0])
    (place / "plugins" / "my_agent.py").write_text(blocks("agents.md", "python")[0])
    rng = np.random.default_rng(0)
    rows = [f'{{"question": "{a}+{b}=", "answer": "{a + b}"}}' for a, b in rng.integers(100, 999, (60, 2))]
    (place / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return f"plugin_dir={place}/plugins", "response_key=answer", f"rows={place}/rows.jsonl"


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
