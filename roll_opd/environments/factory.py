"""Find and make the environment that a configuration names.

A name is a registered one (`frozen_lake`), a path of ROLL's, a dotted path to a class of the user's own, a game of
gymnasium's (`gymnasium:Taxi-v3`) or an id of GEM's, which has a colon (`game:GuessTheNumber-v0`).
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from roll_opd.base.registry import argument_problems
from roll_opd.environments.interface import ENVIRONMENTS, Environment, EnvironmentFailure
from roll_opd.environments.roll_names import NEEDS, name_of_roll

GYMNASIUM = "gymnasium:"
GEM_PACKAGE = "gem-llm"  # its module is `gem`


def find(env_type: str) -> Callable[..., Any]:
    """Return what makes the environment that `env_type` names; `EnvironmentFailure` where there is none."""
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
        raise EnvironmentFailure(f"env_type {env_type}: expected a class, as roll_opd.environments.Environment is")
    for method in ("reset", "step"):
        own = getattr(found, method, None)
        if not callable(own) or own is getattr(Environment, method):
            raise EnvironmentFailure(f"env_type {env_type}: expected a class with a method {method}; write it")
    return found


def check(env_type: str, config: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a name and its arguments, a sentence each; empty where it can be made.

    Environments of this package and of gymnasium's are made and reset once, to see whether they can be played with
    these values, but for `http`, which asks no server before it is played. A user's own are not made, as they may load
    a model, and GEM's neither, which may load data.
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
    """Return of `check` what can be said without making an environment and importing anything but of this package.

    `has_plugins`: names that nobody knows here may be registered by the user's modules.
    """
    plain = "." not in env_type and ":" not in env_type
    if not (plain or env_type.startswith("roll.")) or (has_plugins and env_type not in {*NEEDS, *ENVIRONMENTS.builtin}):
        return []
    try:
        return _argument_problems(env_type, find(env_type), config)
    except EnvironmentFailure as error:
        return [str(error)]


def make(env_type: str, /, **config: Any) -> Any:
    """Return the environment that `env_type` names, made with `config`.

    `EnvironmentFailure` for a name that is none, for arguments that it does not take, and for what it refuses.
    """
    maker = find(env_type)
    problems = _argument_problems(env_type, maker, config)
    if problems:
        raise EnvironmentFailure("; ".join(problems))
    try:
        return maker(**config)
    except EnvironmentFailure:
        raise
    except Exception as error:  # a user's class can fail in any way
        raise EnvironmentFailure(
            f"env_type {env_type}: cannot be made: {type(error).__name__}: {error}; correct it or its arguments"
        ) from error


def located(env_type: str) -> str:
    """Return a name by which any process finds the environment; `EnvironmentFailure` for what none could import."""
    if env_type in NEEDS:
        find(env_type)  # raises
    return env_type if ":" in env_type or env_type.startswith("roll.") else ENVIRONMENTS.located(env_type)


def _argument_problems(env_type: str, maker: Callable[..., Any], config: Mapping[str, Any]) -> list[str]:
    try:
        found = list(argument_problems(maker, config, given_by_us=0))
    except ValueError:  # written in C, it has no signature that could be checked
        return []
    return [f"env_config.{name}: {problem} (of env_type {env_type})" for name, problem in found]


def _gem(env_type: str) -> Any:
    """Return GEM's module; `EnvironmentFailure` where it is missing, or has no environment of this id."""
    try:
        gem = importlib.import_module("gem")
        known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
    except ImportError as error:
        own = "; a game like it is guess_number, here" if "GuessTheNumber" in env_type else ""
        raise EnvironmentFailure(
            f"env_type {env_type}: GEM's environments are in the package {GEM_PACKAGE}, which cannot be imported"
            f" ({error}); install it (`pip install {GEM_PACKAGE}`), or name one of {ENVIRONMENTS.known}{own}"
        ) from error
    if env_type not in known:  # versions of GEM have other ids
        family = [name for name in known if name.startswith(env_type.partition("-")[0])]
        hint = f"; like it are {', '.join(sorted(family))}" if family else ""
        raise EnvironmentFailure(f"env_type {env_type}: GEM, as it is installed, has no such environment{hint}")
    return gem
