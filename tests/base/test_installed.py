"""Files in the current directory that have the names of packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_opd.base.installed import is_installed, shadowing_files

ROOT = Path(__file__).parents[2]


def write(*files: str) -> None:
    for file in files:
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


def test_code_that_hides_a_package_is_named_and_folders_of_other_names_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    harmless = ("wandb/run/log.txt", "ray/log.txt", "numpy/x.npy", "tests/__init__.py", "mine.py", "sys.py", "a b.py")
    write(*harmless, "tokenizers/x/y.py", "absent_package/__init__.py", "megatron/other/__init__.py")
    assert shadowing_files() == []
    hiding = ["datasets/__init__.py", "json.py", "megatron/core/__init__.py", "torch.py", "vllm.py"]
    write(*hiding)
    found = shadowing_files()
    for file, sentence in zip(hiding, found, strict=True):
        assert sentence.startswith(f"{tmp_path / file.removesuffix('/__init__.py')} "), sentence
        assert "site-packages" in sentence or file == "json.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert not is_installed("absent_package") and not is_installed("mine") and is_installed("ray")
    assert is_installed("wandb") == any(Path(place, "wandb", "__init__.py").exists() for place in sys.path[1:])


def test_a_command_says_which_file_hides_a_package(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in ("plan", "run"):
        done = subprocess.run(
            [sys.executable, "-m", "roll_opd", command, "x.yaml"], cwd=tmp_path, env=environment, capture_output=True
        )
        assert done.returncode == 2 and str(tmp_path / "vllm.py") in done.stderr.decode()
