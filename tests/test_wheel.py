"""The wheel and the source archive: their files, what they do in an empty environment, and whether releases agree."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from check_release import problems
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import roll_opd

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = ("roll_opd", "configs", "examples")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
OF_A_RUN = ("torch", "vllm", "megatron", "ray", "datasets", "tensorboard", "openai", "aiohttp")


def built(kind: str, source: Path, output: Path) -> Path:
    """Build a wheel or a source archive as a build front end does, and return the file."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(output)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from nothing but this archive."""
    place = tmp_path_factory.mktemp("archives")
    for name in SOURCES:
        shutil.copytree(ROOT / name, place / "copy" / name, ignore=shutil.ignore_patterns("__pycache__", "output"))
    for name in FILES:
        shutil.copy(ROOT / name, place / "copy")
    archive = built("sdist", place / "copy", place)
    with tarfile.open(archive) as file:
        file.extractall(place, filter="data")
    return archive, built("wheel", place / archive.name.removesuffix(".tar.gz"), place)


@pytest.fixture(scope="module")
def installed(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel, as pip installs them."""
    place = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(archives[1]) as wheel:
        wheel.extractall(place)
    return place


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with links to the packages that an installation without an extra brings, and to no others."""
    place = tmp_path_factory.mktemp("empty")
    todo, seen = list(map(Requirement, PROJECT["dependencies"])), set()
    while todo:
        wanted = todo.pop()
        key = canonicalize_name(wanted.name)
        if key not in seen and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            seen.add(key)
            todo += map(Requirement, metadata.requires(wanted.name) or ())
            for part in {file.parts[0] for file in metadata.files(wanted.name) or () if file.parts[0] != ".."}:
                link = place / part
                if not link.exists():
                    link.symlink_to(metadata.distribution(wanted.name).locate_file(part))
    assert not any((place / name).exists() for name in OF_A_RUN)
    return place


def started(words: list[str], where: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run `roll-opd WORDS` with a Python that finds packages in `path` alone, in a home of its own."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(where), "PYTHONPATH": os.pathsep.join(map(str, path))}
    program = "import sys; from roll_opd.commands.main import main; sys.exit(main())"
    command = [sys.executable, "-S", "-P", "-c", program, *words]
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_an_archive_has_all_that_the_commands_read(archives: tuple[Path, Path], installed: Path) -> None:
    shipped = installed / "roll_opd/shipped"
    expected = {path for path in (ROOT / "configs").rglob("*.yaml")} | set((ROOT / "examples").rglob("*.yaml"))
    of_examples = ("demo/data", "demo/models", "games/models")
    expected |= {path for part in of_examples for path in (ROOT / "examples" / part).rglob("*.*")}
    expected |= {*(ROOT / "examples").glob("*/my_*.py"), *(ROOT / "examples").glob("grafana/*.json")}
    brought = {ROOT / path.relative_to(shipped) for path in shipped.rglob("*") if path.is_file()}
    assert brought == {path for path in expected if path.is_file()}
    own = [path for path in (ROOT / "roll_opd").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    of_wheel = {path.relative_to(installed) for path in (installed / "roll_opd").rglob("*") if path.is_file()}
    assert {path.relative_to(ROOT) for path in own} == {path for path in of_wheel if "shipped" not in path.parts}
    with tarfile.open(archives[0]) as file:
        tops = {Path(name).parts[1] for name in file.getnames() if len(Path(name).parts) > 1}
    assert tops == {*SOURCES, *FILES, "PKG-INFO", "setup.cfg", "roll_opd.egg-info"}


@pytest.mark.slow
def test_what_an_installation_without_an_extra_does(installed: Path, empty: Path, tmp_path: Path) -> None:
    """It plans projects, checks a model's files, audits and reports runs; other commands name the extra."""
    recorded = tmp_path / "recorded"
    shutil.copytree(ROOT / "tests/tracking/recorded_run", recorded)
    for words, code, out, said in (
        (["--help"], 0, "check-model", ""),
        (["init", "p"], 0, "./run.sh", ""),
        (["plan", "p/distill.yaml"], 0, "strategy_config: options are not checked", ""),
        (["check-model", "p/models/student"], 0, "ok files: qwen3", ""),
        (["report", str(recorded)], 0, "report.html", ""),
        (["audit", str(recorded)], 0, "no contradiction", ""),
        (["run", "p/distill.yaml"], 1, "", "lacks torch, megatron-core, ray, datasets and more; install the package"),
        (["serve", "p/models/teacher"], 1, "", "pip install 'roll_opd[cpu]'"),
        (["plan", "p/distill.yaml", "policy_loss_fn=my_loss.f"], 2, "", "pip install 'roll_opd[cpu]'"),
    ):
        (tmp_path / "my_loss.py").write_text("import torch\n")
        done = started(words, tmp_path, installed, empty)
        printed, error = (" ".join(text.split()) for text in (done.stdout, done.stderr))
        assert done.returncode == code and out in printed and said in error, (words, printed[-500:], error)
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_each_example_of_the_wheel_can_be_planned(installed: Path, tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
import roll_opd
from roll_opd.commands import main
from roll_opd.planner.load_plan import load_plan
assert Path(roll_opd.__file__).is_relative_to(sys.argv[1]), roll_opd.__file__
sys.path[:] = [place for place in sys.path if Path(place) != Path(sys.argv[2])]
for example in ("demo", "games"):
    assert main.main(["init", example, "--example", example]) == 0
    for name in sorted(path.stem for path in Path(example).glob("*.yaml")):
        plan = load_plan(example, name)
        assert Path(plan.student.model.path).is_relative_to(Path(example).resolve())
Path("demo").rename("moved")
assert load_plan("demo", "sft").student.model.path.startswith(sys.argv[1])  # as in the repository
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, installed, ROOT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_pip_installs_an_archive_in_an_empty_environment(
    kind: str, archives: tuple[Path, Path], tmp_path: Path
) -> None:
    python = tmp_path / "env/bin/python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLL_OPD"))}
    environment["HOME"] = str(tmp_path)
    base = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for command in (
        [base, "-m", "venv", "env"],
        [python, "-m", "pip", "install", "-q", archives[kind == "wheel"]],
        ["env/bin/roll-opd", "init", "p"],
        ["env/bin/roll-opd", "plan", "p/distill.yaml"],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr[-2000:]
    installed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert not {name.split()[0] for name in installed.splitlines()} & set(OF_A_RUN)


# releases


def test_version_changelog_citation_and_tags_agree() -> None:
    """A tag of a version is only right on a commit whose changelog has a section of this version."""
    done = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    tags = [tag for tag in done.stdout.split() if re.fullmatch(r"v\d.*", tag)]
    assert problems(ROOT, tags[0] if tags else None) == []


def test_a_tag_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "roll_opd").mkdir()
    (tmp_path / "roll_opd/__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("version: 1.2.0\ndate-released: 2030-01-02\n")
    ready = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2030-01-02\n\n- It exists.\n\n## [1.1.0] - 2029-01-01\n"
    (tmp_path / "CHANGELOG.md").write_text(ready)
    assert problems(tmp_path, None) == problems(tmp_path, "v1.2.0") == []
    for tag, changelog, citation, found in (
        ("v1.2.1", ready, "1.2.0", "v1.2.1"),
        ("v1.2.0", ready.replace("[1.2.0]", "[1.1.9]"), "1.2.0", "CHANGELOG.md"),
        ("v1.2.0", ready.replace("[Unreleased]\n", "[Unreleased]\n\n- More.\n"), "1.2.0", "Unreleased"),
        ("v1.2.0", ready, "1.1.0", "CITATION.cff"),
        ("v1.2.0", ready.replace("- 2030-01-02", "- 2030-01-03"), "1.2.0", "date"),
        (None, ready.replace("## [1.2.0]", "## [1.3.0]"), "1.2.0", "1.3.0"),
    ):
        (tmp_path / "CHANGELOG.md").write_text(changelog)
        (tmp_path / "CITATION.cff").write_text(f"version: {citation}\ndate-released: 2030-01-02\n")
        assert any(found in problem for problem in problems(tmp_path, tag)), (tag, found)


def test_the_release_workflow_builds_tests_and_publishes_in_this_order() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow = yaml.safe_load(text)
    jobs = workflow["jobs"]
    assert workflow[True] == {"push": {"tags": ["v*"]}} and "NEVER RUN" in text  # YAML reads `on` as True
    assert workflow["permissions"] == {"contents": "read"}
    assert (jobs["test"]["needs"], set(jobs["publish"]["needs"])) == ("build", {"test", "suite"})
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and "secrets." not in text
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    low, high = (int(part) for part in re.findall(r"3\.(\d+)", PROJECT["requires-python"]))
    assert versions == [f"3.{minor}" for minor in range(low, high)]
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert any("scripts/check_release.py" in step for step in steps)
    assert roll_opd.__version__ not in text and "://" not in text
