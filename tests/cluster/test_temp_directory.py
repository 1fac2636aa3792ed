"""A run's directory for temporary files, if the directory in the environment variable cannot be used."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from roll_opd.base.failures import RunError
from roll_opd.base.paths import report_temp_directory
from roll_opd.cluster.ray_environment import MAX_LENGTH, MAX_RAY_LENGTH, run_temp_directory, socket_parent


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
        parent = Path(os.environ["RAY_TMPDIR"])
        assert parent.is_dir() and len(str(parent)) <= MAX_RAY_LENGTH
        assert place == "missing" or parent.samefile(outer)  # sessions stay on the user's disk
    shutil.rmtree(directory)
    assert place == "missing" or outer.is_dir()
    assert os.environ["TMPDIR"] == str(outer) and "RAY_TMPDIR" not in os.environ
    assert Path(tempfile.gettempdir()).is_dir()


def test_a_tmpdir_that_is_not_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for place, is_named in ((tmp_path, False), (tmp_path / "missing", True), (tmp_path / "file", True)):
        monkeypatch.setenv("TMPDIR", str(place))
        monkeypatch.setattr(tempfile, "tempdir", None)
        report_temp_directory()
        said = capsys.readouterr().err
        assert (str(place) in said and tempfile.gettempdir() in said) == is_named


def test_a_directory_of_ray_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file" / "x"))
    reaper: Any = Removing()
    with pytest.raises(RunError, match="RAY_TMPDIR"), run_temp_directory(reaper):
        pass
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray" / ("long" * 20)))
    with run_temp_directory(reaper):
        assert len(os.environ["RAY_TMPDIR"]) <= MAX_RAY_LENGTH
    shutil.rmtree(reaper.directories[-1])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    assert len(socket_parent()) <= MAX_LENGTH
