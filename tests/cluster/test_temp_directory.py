"""A run's directory for temporary files, if the directory in the environment variable cannot be used."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from roll_opd.cluster.ray_environment import MAX_LENGTH, run_temp_directory


class Removing:
    """Replaces the reaper process: removes nothing before the end of a test."""

    def __init__(self) -> None:
        self.directories: list[Path] = []

    def remove_at_the_end(self, directory: Path) -> None:
        self.directories.append(directory)


@pytest.mark.parametrize("place", ["missing", "a/long/" + "path/" * MAX_LENGTH, "own"])
def test_a_directory_of_the_run(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = tmp_path / place
    if place != "missing":
        outer.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(outer))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    reaper: Any = Removing()
    with run_temp_directory(reaper):
        (directory,) = reaper.directories
        assert os.environ["TMPDIR"] == str(directory) == tempfile.gettempdir()
        assert directory.is_dir() and len(str(directory)) <= MAX_LENGTH
        assert Path(os.environ["RAY_TMPDIR"]).is_dir()
    directory.rmdir()
    assert os.environ["TMPDIR"] == str(outer) and "RAY_TMPDIR" not in os.environ
    assert Path(tempfile.gettempdir()).is_dir()
