"""Launchers started with a Python other than the project's: they use .venv, or end with a message of one line."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from roll_opd.base.interpreter import lacking

ROOT = Path(__file__).parents[2]
SAYS = "import sys; print(sys.version_info[:2])"


def other_pythons() -> list[str]:
    """Return Pythons outside the project's range, where a version manager or the system has any."""
    places = [*Path.home().glob(".pyenv/versions/3.*/bin/python3"), *map(Path, filter(None, [shutil.which("python3")]))]
    found = {}
    for place in places:
        said = subprocess.run([place, "-c", SAYS], capture_output=True, text=True).stdout.strip()
        if said and said not in ("(3, 11)", "(3, 12)", "(3, 13)"):
            found[said] = str(place)
    versions = sorted((eval(version), path) for version, path in found.items())
    paths = [path for version, path in versions if version >= (3, 6)]
    return [*paths[:1], *paths[1:][-1:]]  # the oldest and the newest


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the files that a launcher reads, without .venv."""
    place = tmp_path / "my checkout"
    shutil.copytree(ROOT / "roll_opd", place / "roll_opd", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("__pycache__", "models"))
    shutil.copy(ROOT / "pyproject.toml", place)
    return place


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A Python of the right version without packages."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return tmp_path / "bare" / "bin" / "python"


def ways(checkout: Path, python: str | Path) -> list[list[str]]:
    launchers = sorted(checkout.glob("examples/start_*_pipeline.py"))
    assert len(launchers) == 7
    return [*([str(python), str(launcher)] for launcher in launchers), [str(python), "-m", "roll_opd", "plan"]]


def ended(command: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


def test_a_python_without_the_packages_ends_with_one_line(checkout: Path, bare: Path) -> None:
    for command in ways(checkout, bare):
        done = ended(command, checkout)
        assert (done.returncode, done.stdout) == (1, "")
        names = "numpy, transformers, safetensors, " + ("tokenizers" if "plan" in command else "torch")  # not for plan
        assert done.stderr.startswith(f"roll-opd: {bare} lacks ") and done.stderr.endswith(
            f" and more; run `make setup` in {checkout} to create .venv\n"
        )
        assert set(names.split(", ")) == set(done.stderr.partition(" lacks ")[2].partition(" and more")[0].split(", "))


def test_the_single_file_example_names_what_it_lacks(checkout: Path, bare: Path) -> None:
    """It runs without the engines, so the message names only the packages that it imports."""
    done = ended([str(bare), str(checkout / "examples/minimal_opd.py")], checkout)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"roll-opd: {bare} lacks roll_opd, torch, transformers; run `make setup` in {checkout} to create .venv\n"
    )


def test_an_installed_package_without_its_extra_names_the_extra(checkout: Path, bare: Path) -> None:
    (checkout / "pyproject.toml").unlink()
    done = ended([str(bare), "-m", "roll_opd", "run"], checkout)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "lacks torch, vllm;" in done.stderr and "pip install 'roll_opd[cpu]'" in done.stderr


@pytest.mark.parametrize("python", other_pythons())
def test_a_python_of_another_version_ends_with_one_line(python: str, checkout: Path) -> None:
    single_file = [python, str(checkout / "examples/minimal_opd.py")]
    for command in [*ways(checkout, python)[-2:], [python, "-m", "roll_opd", "doctor"], single_file]:
        done = ended(command, checkout)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "is Python 3." in done.stderr and "needs 3.11 to 3.13; run `make setup`" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("other", [None, *(pytest.param(o, marks=pytest.mark.nightly) for o in other_pythons())])
def test_venv_is_used_from_everywhere(other: str | None, checkout: Path, bare: Path, tmp_path: Path) -> None:
    """.venv links to these tests' environment; arguments are passed on, and paths start at the current directory."""
    (checkout / ".venv").symlink_to(sys.prefix)
    (tmp_path / "elsewhere").mkdir()
    command = [*ways(checkout, other or bare)[0], "--config", "no file.yaml", "a=1"]
    done = ended(command, tmp_path / "elsewhere", PYTHONPATH=str(checkout))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no file.yaml" in done.stderr and str(tmp_path / "elsewhere") in done.stderr


@pytest.mark.slow
def test_shell_scripts_find_a_python(checkout: Path, bare: Path, tmp_path: Path) -> None:
    scripts = sorted(checkout.glob("examples/*/run_*.sh"))
    assert scripts
    stubs = tmp_path / "stubs"  # of a version manager, for a Python that is not there
    stubs.mkdir()
    for name in ("python", "python3"):
        (stubs / name).write_text("#!/bin/sh\necho not found >&2\nexit 127\n")
        (stubs / name).chmod(0o755)
    path = {"PATH": f"{stubs}:/usr/bin:/bin"}
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    for script in scripts:
        done = ended(["bash", str(script)], tmp_path, PATH=f"{stubs}:{tmp_path / 'bin'}")
        assert done.returncode == 1 and done.stderr.endswith(f"run `make setup` in {checkout} to create .venv\n")
        assert done.stderr.count("\n") == 1
    (checkout / ".venv").symlink_to(sys.prefix)
    done = ended(["bash", str(scripts[0]), "no_such_key=1"], tmp_path, PYTHONPATH=str(checkout), **path)
    assert done.returncode == 2 and "no_such_key" in done.stderr


def test_the_environment_of_the_project_has_what_the_project_needs() -> None:
    assert lacking(needs_packages=True) == ""


def test_the_command_of_an_environment_without_its_packages_ends_with_one_line(checkout: Path, bare: Path) -> None:
    command = [
        str(bare),
        "-c",
        "import sys; from roll_opd.commands.main import main; sys.exit(main())",
        "plan",
        "run.yaml",
    ]
    done = ended(command, checkout)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"roll-opd: {bare} lacks numpy, ") and "run `make setup`" in done.stderr


def test_modules_on_pythonpath_count_as_installed(checkout: Path, bare: Path, tmp_path: Path) -> None:
    """As Megatron-LM's checkout: modules without the metadata of an installed package."""
    for name in ("torch", "numpy", "megatron/core", "yaml"):
        (tmp_path / "path" / name).mkdir(parents=True)
        (tmp_path / "path" / name / "__init__.py").touch()
    done = ended(ways(checkout, bare)[0], checkout, PYTHONPATH=str(tmp_path / "path"))
    assert done.returncode == 1 and "lacks transformers, safetensors, tokenizers, huggingface_hub and" in done.stderr


def test_another_project_s_file_beside_an_installed_package(checkout: Path, bare: Path) -> None:
    (checkout / "pyproject.toml").write_text('[project]\nname = "other"\n')
    done = ended([str(bare), "-c", "from roll_opd.base.interpreter import lacking; print([lacking(True)])"], checkout)
    assert done.stdout == "['']\n"


def test_a_damaged_venv_is_not_started_for_ever(checkout: Path, bare: Path) -> None:
    """Without pyvenv.cfg, .venv's Python has the prefix of the Python that it was made with."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(bare)
    done = ended(ways(checkout, bare)[0], checkout)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "run `make setup`" in done.stderr
