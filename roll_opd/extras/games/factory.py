"""Find, check and create environments named in a configuration.

A name has one of these forms:

- a registered name (`frozen_lake`);
- a ROLL class path;
- a dotted path to a user's class;
- a gymnasium game (`gymnasium:Taxi-v3`);
- a GEM id with a colon (`game:GuessTheNumber-v0`).
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from roll_opd.base.registry import argument_problems
from roll_opd.extras.games.environment_interface import ENVIRONMENTS, Environment, EnvironmentFailure

GYMNASIUM = "gymnasium:"
GEM_PACKAGE = "gem-llm"  # name of the package on PyPI; its module is `gem`


def find(env_type: str) -> Callable[..., Any]:
    """Return the constructor of environment `env_type`. Raises `EnvironmentFailure` if there is no constructor."""
    if env_type in NEEDS:
        raise EnvironmentFailure(f"env_type {env_type}: {NEEDS[env_type]}")
    if env_type.startswith("roll."):
        return find(name_of_roll(env_type))
    if env_type.startswith(GYMNASIUM):
        return partial(ENVIRONMENTS.find("gymnasium"), env_type.removeprefix(GYMNASIUM))
    if ":" in env_type:
        return partial(_gem(env_type).make, env_type)
    found = ENVIRONMENTS.find(env_type)
    if not inspect.isclass(found):
        raise EnvironmentFailure(f"env_type {env_type}: expected a class such as roll_opd.extras.games.Environment")
    for method in ("reset", "step"):
        own = getattr(found, method, None)
        if not callable(own) or own is getattr(Environment, method):
            raise EnvironmentFailure(f"env_type {env_type}: expected a class with a method {method}; write it")
    return found


def check(env_type: str, config: Mapping[str, Any]) -> list[str]:
    """Return the problems of an environment's name and arguments, one sentence each.

    The list is empty if no problem was found. Built-in and gymnasium environments are created with these arguments and
    reset once. The environment `http` is created but not reset, because a reset would contact its server. Environments
    of users and of GEM are not created, because they may load a model or data.
    """
    try:
        problems = _argument_problems(env_type, find(env_type), config)
        if not problems and (env_type in ENVIRONMENTS.builtin or env_type.startswith((GYMNASIUM, "roll."))):
            made = make(env_type, **config)
            if env_type != "http":
                made.reset(seed=0)
            made.close()
    except EnvironmentFailure as error:
        return [str(error)]
    return problems


def check_declared(env_type: str, config: Mapping[str, Any], has_plugins: bool = False) -> list[str]:
    """Return the problems that can be found without creating an environment or importing modules outside this package.

    `has_plugins`: whether user modules may register environments. If they may, unknown names are accepted.
    """
    plain = "." not in env_type and ":" not in env_type
    if not (plain or env_type.startswith("roll.")) or (has_plugins and env_type not in {*NEEDS, *ENVIRONMENTS.builtin}):
        return []
    try:
        return _argument_problems(env_type, find(env_type), config)
    except EnvironmentFailure as error:
        return [str(error)]


def make(env_type: str, /, **config: Any) -> Any:
    """Create environment `env_type` with the arguments `config`.

    Raises `EnvironmentFailure` if the name is unknown, if the arguments are wrong, or if the constructor fails.
    """
    maker = find(env_type)
    problems = _argument_problems(env_type, maker, config)
    if problems:
        raise EnvironmentFailure("; ".join(problems))
    try:
        return maker(**config)
    except EnvironmentFailure:
        raise
    except Exception as error:  # a user's class may raise any exception
        raise EnvironmentFailure(
            f"env_type {env_type}: cannot be created: {type(error).__name__}: {error}; correct env_type or env_config"
        ) from error


def _argument_problems(env_type: str, maker: Callable[..., Any], config: Mapping[str, Any]) -> list[str]:
    try:
        found = list(argument_problems(maker, config, given_by_us=0))
    except ValueError:  # a class written in C has no signature
        return []
    return [f"env_config.{name}: {problem} (of env_type {env_type})" for name, problem in found]


def _gem(env_type: str) -> Any:
    """Import GEM and check that it has the id `env_type`. Raises `EnvironmentFailure` if GEM or the id is missing."""
    try:
        gem = importlib.import_module("gem")
        known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
    except ImportError as error:
        own = "; guess_number is a similar built-in game" if "GuessTheNumber" in env_type else ""
        raise EnvironmentFailure(
            f"env_type {env_type}: GEM's environments need the package {GEM_PACKAGE}, which cannot be imported"
            f" ({error}); install it (`pip install {GEM_PACKAGE}`), or name one of {ENVIRONMENTS.known}{own}"
        ) from error
    if env_type not in known:  # ids differ between versions of GEM
        family = [name for name in known if name.startswith(env_type.partition("-")[0])]
        hint = f"; similar: {', '.join(sorted(family))}" if family else ""
        raise EnvironmentFailure(f"env_type {env_type}: the installed GEM has no such environment{hint}")
    return gem


# class at the end of a path below roll.pipeline.agentic.env -> name here
CLASSES = {"FrozenLakeEnv": "frozen_lake", "SokobanEnv": "sokoban", "MathEnv": "roll_math"}
SERVED = "or serve it from a process that has it, and set `env_type: http` with its url"
ROCK = f"needs a ROCK server, which starts containers for its episodes; use an environment of this package, {SERVED}"
# unsupported env_type -> what it needs, and an alternative
NEEDS = {
    "webshop": (
        "needs the package webshop-minimal of ROLL's third_party/ and its data of products;"
        f" use search_shop, a small shop without data, {SERVED}"
    ),
    "roll_qa": (
        "needs a data set of questions and, for its tool, a retrieval server over an encyclopedia;"
        f" write an environment of your own, {SERVED}"
    ),
    "roll_code": (
        "needs GEM's runner of programs; use the reward code_sandbox, which judges programs by the test cases of a row,"
        f" {SERVED}"
    ),
    "deepeyes": f"needs a vision-language model and its images; use a text environment, {SERVED}",
    "sokoban_mcp": f"needs an MCP server that plays the game; use sokoban, {SERVED}",
    "sokoban_sandbox": ROCK,
    "rock_tb_native_env": ROCK,
    "sokoban_native_env": f"needs ROLL's own agent loop, which uses lists of messages; use sokoban, {SERVED}",
    "sokoban_tool_call": f"needs ROLL's own agent loop, which executes tool calls; use sokoban, {SERVED}",
    "openreward_env": f"needs the package openreward and its service; use an environment of this package, {SERVED}",
    "atropos_env": f"needs the package atroposlib and its API server; use an environment of this package, {SERVED}",
}


def name_of_roll(path: str) -> str:
    """Return this package's name for a ROLL class path. Raises `EnvironmentFailure` if there is no counterpart."""
    name = CLASSES.get(path.replace(":", ".").rpartition(".")[2])
    if name is None:
        raise EnvironmentFailure(
            f"env_type {path} has no counterpart here; use one of ROLL's classes {', '.join(CLASSES)}, or a dotted path"
            " to your class"
        )
    return name
