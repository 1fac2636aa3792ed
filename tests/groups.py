"""Groups of tests: all tests of a group run in one process, and share processes that take long to start.

A group is a set of files of one room; every other file is a separate group. `pytest -n` distributes the groups in the
order of `ORDER`, the most expensive first, so that its processes end at the same time. Groups are derived from paths,
because pytest-xdist 3.8 has no other groups under pytest 9.2: its `--dist loadgroup` adds a suffix to `Item._nodeid`,
which `Item.nodeid` no longer reads.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# (group, its files), in the order in which groups start
GROUPS = (
    ("staged", "tests/pipelines/test_staged_*.py"),
    ("staged", "tests/pipelines/test_rewarded_runs.py"),
    ("staged", "tests/pipelines/test_runs.py"),
    ("staged", "tests/pipelines/test_engine_check.py"),
    ("staged", "tests/pipelines/test_update_frames.py"),
    ("megatron", "tests/megatron_engine/*.py"),
    ("launches", "tests/pipelines/*.py"),
    ("pools", "tests/workers/*.py"),
    ("engines", "tests/inference/*.py"),
)
EXPENSIVE_FILES = (  # of five CPU-seconds or ten seconds of waiting or more
    # files that wait, while other processes have groups that compute
    "tests/extras/graders/test_llm_judge.py",
    "tests/extras/games/test_http_client.py",
    "tests/cluster/test_cluster_files.py",
    "tests/cluster/test_liveness.py",
    "tests/cluster/test_process_reaper.py",
    # the most expensive first
    "tests/cluster/test_forkserver_start.py",
    "tests/extras/graders/test_sandbox_walls.py",
    "tests/extras/graders/test_math_rule.py",
    "tests/test_minimal_opd.py",
    "tests/test_extending.py",
    "tests/rollout/test_teachers_of_games.py",
    "tests/test_wheel.py",
    "tests/rollout/test_gate.py",
    "tests/teachers/test_http_teacher.py",
    "tests/teachers/test_teacher_checks.py",
    "tests/commands/test_command_line.py",
    "tests/config/test_config_problems.py",
    "tests/extras/graders/test_hostile_text.py",
    "tests/workflows/test_workflow_endpoint.py",
    "tests/test_packaging.py",
    "tests/config/test_config_hostile.py",
    "tests/config/test_config_roll_files.py",
    "tests/data/test_dataset.py",
    "tests/base/test_interpreter.py",
    "tests/tracking/test_forged_ledgers.py",
    "tests/extras/games/test_games.py",
    "tests/extras/report/test_report.py",
    "tests/config/test_names_on_a_hub.py",
    "tests/extras/alarm/test_divergence_alarm.py",
    "tests/test_architecture.py",
    "tests/base/test_entry_points.py",
    "tests/test_benchmarks_gpu.py",
    "tests/config/test_history.py",
    "tests/extras/graders/test_code_sandbox.py",
    "tests/extras/alarm/test_significance.py",
    "tests/extras/workflows/test_environment_tokens.py",
    "tests/extras/trinity/test_trinity_yaml.py",
    "tests/config/test_config_mixed.py",
    "tests/config/test_config_plan.py",
)
ORDER = (*dict(GROUPS), *EXPENSIVE_FILES)
READ_ONCE = "RAY_"  # variables that Ray's core reads once in a process: it keeps its first token for later clusters
# session fixtures that end with their group: processes that nobody uses any more take memory from the next group
STARTED_ONCE = ("answers", "cluster", "forks", "shared_engine", "stage", "warm")


def group_of(nodeid: str) -> str:
    """Return the group of a test id."""
    path = nodeid.partition("::")[0]
    return next((name for name, pattern in GROUPS if fnmatch(path, pattern)), path)


def place_of(nodeid: str) -> int:
    """Return the place of a test's group in `ORDER`; other files are last."""
    group = group_of(nodeid)
    return ORDER.index(group) if group in ORDER else len(ORDER)


def scheduler(config: Any, log: Any) -> Any:
    """Return a scheduler of pytest-xdist that assigns whole groups to processes."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # keep the order of collection, which is `ORDER`
    return GroupScheduling(config, log)


class EndOfGroups:
    """Ends the processes of a group after its last test, and restores the environment from before the group.

    A whole run sets variables of its process (plugins of vLLM, a token of Ray, the date of the run), which the next
    group must not read. This is a plugin, because hooks of a conftest are not called for session fixtures, which belong
    to the root directory.
    """

    def __init__(self) -> None:
        self.started: list[tuple[pytest.FixtureDef, Any]] = []
        self.outside: Environment | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.outside = self.outside or Environment()

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
        if fixturedef.argname in STARTED_ONCE:
            self.started.append((fixturedef, request))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        yield
        if nextitem is not None and group_of(nextitem.nodeid) != group_of(item.nodeid):
            while self.started:
                fixturedef, request = self.started.pop()
                fixturedef.finish(request)
            if self.outside:
                self.outside.restore()
            self.outside = None


class Environment:
    """The variables, the module path, the user modules and the temporary directory of this process."""

    def __init__(self) -> None:
        self.variables, self.path, self.temporary = dict(os.environ), list(sys.path), tempfile.tempdir
        self.modules = set(sys.modules)

    def restore(self) -> None:
        for name in os.environ.keys() - self.variables.keys():
            if not name.startswith(READ_ONCE):
                del os.environ[name]
        os.environ.update(self.variables)
        sys.path[:], tempfile.tempdir = self.path, self.temporary
        # only the group's imports: a look at all 6,000 modules takes 0.07 s, after each of 300 groups
        for name in sys.modules.keys() - self.modules:
            if _is_temporary(sys.modules[name]):
                del sys.modules[name]


def _is_temporary(module: ModuleType) -> bool:
    """Return whether a module was imported from a test's directory; the next group may have another module with this
    name."""
    file = Path(getattr(module, "__file__", None) or os.devnull)
    return file.is_relative_to(tempfile.gettempdir()) and not file.is_relative_to(ROOT)
