"""Modules of the user are found like data files: in the current directory, then next to the configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_opd.base.failures import ConfigError
from roll_opd.base.paths import PathError, also_resolving_in
from roll_opd.base.user_modules import dotted_path, module_variables, search_modules_in, users_module
from roll_opd.commands.main import main
from roll_opd.planner.load_plan import load_plan

REWARDS = """
def good(samples, scale=1.0):
    return [scale * (s.ground_truth in s.response) for s in samples]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if ground_truth in solution_str else 0.0

def of_trl(completions, **kwargs):
    return [1.0 for _ in completions]

def needs_scale(samples, scale):
    return [scale for _ in samples]
"""


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the demo's configurations and a module of a name that no other test has."""
    directory = tmp_path / "d"
    assert main(["init", str(directory), "--example", "demo"]) == 0
    (directory / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return directory


def plan(demo: Path, worker: str, *more: str) -> str:
    """Return the worker's dotted path in the plan; ConfigError if the plan is refused."""
    overrides = [f"rewards.math_rule.worker_cls={worker}", *more]
    return load_plan(str(demo), "rlvr", overrides, runnable=False).rewards[0].terms[0].worker


def test_a_module_beside_the_configuration_is_found(demo: Path) -> None:
    (demo / "beside_one.py").write_text(REWARDS)
    (demo / "own" / "beside_two.py").write_text("from beside_three import good\n")
    (demo / "own" / "beside_three.py").write_text(REWARDS)
    (demo.parent / "from_here.py").write_text(REWARDS)
    assert plan(demo, "beside_one.good") == "beside_one.good"
    assert plan(demo, "own/beside_two.py:good") == "beside_two.good"
    assert plan(demo, f"{demo}/own/beside_three.py:good") == "beside_three.good"
    assert plan(demo, "from_here.good", "+rewards.math_rule.scale=2.0") == "from_here.good"


def test_other_processes_find_the_same_modules(demo: Path) -> None:
    (demo / "own" / "in_a_worker.py").write_text(REWARDS)
    plan(demo, "own/in_a_worker.py:good")
    code = "from roll_opd.base.user_modules import users_module; print(users_module('in_a_worker').__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "ROLL_OPD_MODULE_PATH"}
    for variables, is_found in ((module_variables(), True), ({}, False)):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment | variables, cwd="/", capture_output=True, text=True
        )
        assert (done.stdout.strip() == str(demo / "own" / "in_a_worker.py")) is is_found, done.stderr


def test_the_search_of_another_configuration_replaces_this_one(tmp_path: Path) -> None:
    search_modules_in(tmp_path)
    assert sys.path[-1] == str(tmp_path)
    search_modules_in(tmp_path / "other")
    assert str(tmp_path) not in sys.path and str(tmp_path / "other") == sys.path[-1]


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("own/nowhere.py:good", "file own/nowhere.py not found"),
        ("own/json.py:good", "another module has the name json"),
        ("own/my-reward.py:good", "rename my-reward.py"),
        ("wrong_ones.nowhere", "wrong_ones.py) has no function or class named nowhere"),
        ("absent_module.good", "put it next to the configuration or on PYTHONPATH"),
        ("lacks_a_package.good", "No module named 'no_such_package'"),
        ("wrong_ones.needs_scale", "missing a required argument: 'scale'"),
    ],
)
def test_a_plan_refuses_a_reward_that_a_run_could_not_call(demo: Path, worker: str, said: str) -> None:
    (demo / "wrong_ones.py").write_text(REWARDS)
    (demo / "lacks_a_package.py").write_text("import no_such_package\n")
    for name in ("json.py", "my-reward.py"):
        (demo / "own" / name).write_text(REWARDS)
    with pytest.raises(ConfigError) as error:
        plan(demo, worker)
    assert len(error.value.problems) == 1 and said in error.value.problems[0]


@pytest.mark.parametrize(("name", "expected"), [("compute_score", [1.0, 0.0]), ("of_trl", [1.0, 1.0])])
def test_the_adapter_of_another_signature_is_a_reward(demo: Path, name: str, expected: list[float]) -> None:
    """The code in the message, put into the module, is accepted and scores as the function does."""
    from roll_opd.rewards.interface import RewardSample
    from roll_opd.rewards.reward_registry import resolve

    module = demo / f"foreign_{name}.py"
    module.write_text(REWARDS)
    with pytest.raises(ConfigError) as error:
        plan(demo, f"{module.stem}.{name}")
    code = error.value.problems[0].split("\n", 1)[1].rpartition("\n")[0]
    other = demo / f"adapted_{name}.py"
    other.write_text(REWARDS + "\n" + "\n".join(line[8:] for line in code.splitlines()) + "\n")
    assert plan(demo, f"{other.stem}.score") == f"{other.stem}.score"
    samples = [RewardSample("a", "it is 5", "5", "t"), RewardSample("b", "it is 6", "5", "t")]
    assert list(resolve(f"{other.stem}.score")(samples)) == expected  # type: ignore[call-overload]


def test_a_file_is_looked_up_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "looked_up.py").write_text(REWARDS)
    with pytest.raises(PathError, match=r"file looked_up\.py not found"):
        dotted_path("looked_up.py:good")
    with also_resolving_in(tmp_path):
        assert dotted_path("looked_up.py:good") == "looked_up.good"
    assert users_module("looked_up").__file__ == str(tmp_path / "looked_up.py")
    assert dotted_path("mypackage.module.good") == "mypackage.module.good"
