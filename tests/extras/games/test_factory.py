"""Environments by name: registered, dotted path, ROLL's, GEM's, gymnasium's; and unknown arguments."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from roll_opd.base.frozen import freeze
from roll_opd.extras.games import ENVIRONMENTS, Environment, EnvironmentFailure, check, find, make
from roll_opd.extras.games.environment_interface import read_reset, read_step
from roll_opd.extras.games.factory import NEEDS

OWN = """
from roll_opd.extras.games import ENVIRONMENTS, Environment

@ENVIRONMENTS.register("echo")
class Echo(Environment):
    def __init__(self, times: int = 1):
        self.times = times
    def reset(self, seed=None):
        return str(seed), {}
    def step(self, action):
        return action * self.times, 0.5, True, False, {}

class WithoutStep(Environment):
    def reset(self, seed=None):
        return "", {}

class Broken(Echo):
    def __init__(self):
        raise OSError("no disk")

class Plain:  # of another package, which knows nothing of this one
    def reset(self, seed=None):
        return "", {}
    def step(self, action):
        return "", 0, True, False, {}

a_function = print
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_envs.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_envs"


def test_all_built_in_names_are_found_and_are_environments() -> None:
    assert set(ENVIRONMENTS.builtin) == {
        *("frozen_lake", "guess_number", "gymnasium", "http", "math_python", "number_sum", "roll_math"),
        *("search_shop", "sokoban"),
    }
    for name in ENVIRONMENTS.builtin:
        assert issubclass(find(name), Environment)  # type: ignore[arg-type]


def test_the_room_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom roll_opd.extras.games import ENVIRONMENTS, find\n"
        "for name in ENVIRONMENTS.builtin: find(name)\n"
        "print({'torch', 'vllm', 'megatron', 'ray', 'transformers', 'gymnasium', 'gem'} & sys.modules.keys() or 'free')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("free\n", "")


def test_a_class_of_ones_own(own: str) -> None:
    env = make("my_envs.Echo", times=2)
    assert env.reset(seed=3) == ("3", {})
    assert env.step("ab") == ("abab", 0.5, True, False, {})
    env.close()
    assert make("echo").step("x")[0] == "x"  # the name that its module has registered
    assert make("my_envs.Plain").reset() == ("", {})
    assert check("my_envs.Echo", {"times": 3}) == []
    assert check("my_envs.Broken", {}) == []  # it is not made before it is needed
    with pytest.raises(EnvironmentFailure, match="cannot be created: OSError: no disk"):
        make("my_envs.Broken")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_envs.WithoutStep", "a class with a method step; write it"),
        ("my_envs.a_function", "expected a class"),
        ("my_envs.number", "no class named number"),
        ("my_envs.Nothing", "no class named Nothing"),
        ("no_such_module.Game", "cannot be imported"),
        ("frozenlake", "Known are .*frozen_lake, guess_number"),
        ("", "unknown environment"),
        ("roll.pipeline.agentic.env.webshop.env.WebShopEnv", "has no counterpart here"),
    ],
)
def test_names_of_no_environment_are_refused(own: str, name: str, said: str) -> None:
    with pytest.raises(EnvironmentFailure, match=said):
        make(name)
    (problem,) = check(name, {})
    assert re.search(said, problem)


@pytest.mark.parametrize("name", NEEDS)
def test_what_needs_a_service_says_what(name: str) -> None:
    (problem,) = check(name, {})
    with pytest.raises(EnvironmentFailure, match="needs"):
        find(name)
    assert problem.startswith(f"env_type {name}: needs ")
    assert "; use " in problem or "; write " in problem


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("roll.pipeline.agentic.env.frozen_lake.FrozenLakeEnv", "frozen_lake"),
        ("roll.pipeline.agentic.env.sokoban:SokobanEnv", "sokoban"),
        ("roll.pipeline.agentic.env.gem.math_env:MathEnv", "roll_math"),
    ],
)
def test_rolls_paths_name_our_environments(path: str, name: str) -> None:
    assert find(path) is find(name)


def test_arguments_are_checked_before_anything_is_made() -> None:
    assert check("frozen_lake", {"sise": 4}) == [
        "env_config.sise: unknown argument; did you mean 'size'? (of env_type frozen_lake)"
    ]
    (problem,) = check("guess_number", {"colour": 1})
    assert "known are max_steps, min_number, max_number" in problem
    assert len(check("sokoban", {"dim_room": "6x6", "num_boxes": "1"})) == 2
    with pytest.raises(EnvironmentFailure, match="should be a valid integer, got '4'"):
        make("frozen_lake", size="4")
    assert check("http", {}) == ["env_config.url: is missing (of env_type http)"]


THINK = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
SYMBOLS = {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("sokoban", {"max_steps": 10, "format_penalty": -0.15, "dim_room": [6, 6], "num_boxes": 1}),
        ("sokoban", {"max_steps": 10, "dim_room": [10, 10], "num_boxes": 2, "search_depth": 10}),
        ("sokoban", {"search_depth": 30, "dim_room": [6, 6], "num_boxes": 1, "grid_lookup": SYMBOLS}),
        ("frozen_lake", {"action_pattern": THINK, "max_steps": 10, "format_penalty": -0.01, "is_slippery": False}),
    ],
)
def test_the_arguments_of_rolls_files(name: str, config: dict[str, Any]) -> None:
    """As in its examples/config/traj_envs.yaml; also frozen as in a plan, and with text keys as from JSON."""
    for given in (config, freeze(config), json.loads(json.dumps(config))):
        assert check(name, given) == []
        assert make(name, **given).reset(seed=1) == make(name, **config).reset(seed=1)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("frozen_lake", {"size": 1}),
        ("frozen_lake", {"p": 0.0}),
        ("frozen_lake", {"render_mode": "rgb_array"}),
        ("frozen_lake", {"map_lookup": {"Z": 1}}),
        ("frozen_lake", {"action_lookup": {7: "Jump"}}),
        ("frozen_lake", {"action_lookup": {0: "go", 1: "GO"}}),
        ("frozen_lake", {"action_pattern": "("}),
        ("frozen_lake", {"action_pattern": "no group"}),
        ("sokoban", {"dim_room": [6]}),
        ("sokoban", {"dim_room": [4, 4], "num_boxes": 3}),
        ("sokoban", {"grid_lookup": {9: "?"}}),
        ("sokoban", {"max_steps": 0}),
        ("sokoban", {"search_depth": 3}),  # moves in which no four boxes are pulled anywhere
        ("guess_number", {"min_number": 5, "max_number": 5}),
        ("number_sum", {"turns": 0}),
        ("http", {"url": "localhost:8000"}),
        ("roll_math", {"dataset_name": "axon-rl/GSM-8k"}),
        ("search_shop", {"num_products": 0}),
    ],
)
def test_impossible_values_are_reported_in_one_sentence(name: str, config: dict[str, Any]) -> None:
    (problem,) = check(name, config)
    assert "\n" not in problem and len(problem) < 300
    with pytest.raises(EnvironmentFailure):
        make(name, **config).reset(seed=0)


def test_gems_environments_need_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(EnvironmentFailure, match=r"pip install gem-llm.*guess_number is a similar built-in game"):
        make("game:GuessTheNumber-v0", max_number=3)


def test_gems_environments_are_made_by_gem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `make` gets the id and the arguments; an unknown argument is reported."""
    gem, registration = ModuleType("gem"), ModuleType("gem.envs.registration")
    gem.make = lambda env_id, **config: (env_id, config)  # type: ignore[attr-defined]
    registration.ENV_REGISTRY = {"game:Here-v0": None, "game:Other-v0": None}  # type: ignore[attr-defined]
    for module in (gem, ModuleType("gem.envs"), registration):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert make("game:Here-v0", max_turns=3) == ("game:Here-v0", {"max_turns": 3})
    (problem,) = check("game:Here-v1", {})
    assert problem.endswith("the installed GEM has no such environment; similar: game:Here-v0")
    with pytest.raises(EnvironmentFailure, match=r"has no such environment$"):
        make("game:There-v0")


def test_a_game_of_gems_plays() -> None:
    """With the real package, if it is installed."""
    pytest.importorskip("gem.envs", reason="needs GEM (pip install gem-llm)")
    from gem.envs.registration import ENV_REGISTRY

    name = next(name for name in ENV_REGISTRY if name.startswith("game:GuessTheNumber"))
    env = make(name, min_number=1, max_number=5)
    text, _ = read_reset(env.reset(seed=1), name)
    assert "5" in text
    assert read_step(env.step("\\boxed{3}"), name)[0]
