"""Find, check and create the environment that a configuration names.

A name is registered (`frozen_lake`), a class path of ROLL's, a dotted path to a user's class, a gymnasium game
(`gymnasium:Taxi-v3`) or a GEM id with a colon (`game:GuessTheNumber-v0`).
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
    """Return the constructor of environment `env_type`; raises `EnvironmentFailure` if there is none."""
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
        raise EnvironmentFailure(f"env_type {env_type}: expected a class such as roll_opd.environments.Environment")
    for method in ("reset", "step"):
        own = getattr(found, method, None)
        if not callable(own) or own is getattr(Environment, method):
            raise EnvironmentFailure(f"env_type {env_type}: expected a class with a method {method}; write it")
    return found


def check(env_type: str, config: Mapping[str, Any]) -> list[str]:
    """Return the problems of an environment's name and arguments, one sentence each; empty if it can be created.

    Built-in and gymnasium environments are created and reset once with these arguments, except `http`, which would
    contact its server. User environments may load a model, GEM's may load data: these are not created.
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
    """Return the problems that `check` finds without creating an environment or importing outside this package.

    `has_plugins`: unknown names are accepted, as the user's modules may register them.
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

    Raises `EnvironmentFailure` for an unknown name, wrong arguments, and a failing constructor.
    """
    maker = find(env_type)
    problems = _argument_problems(env_type, maker, config)
    if problems:
        raise EnvironmentFailure("; ".join(problems))
    try:
        return maker(**config)
    except EnvironmentFailure:
        raise
    except Exception as error:  # a user's class may raise anything
        raise EnvironmentFailure(
            f"env_type {env_type}: cannot be created: {type(error).__name__}: {error}; correct it or its arguments"
        ) from error


def located(env_type: str) -> str:
    """Return an importable name of an environment for other processes; raises `EnvironmentFailure` if none exists."""
    if env_type in NEEDS:
        find(env_type)  # raises
    return env_type if ":" in env_type or env_type.startswith("roll.") else ENVIRONMENTS.located(env_type)


def _argument_problems(env_type: str, maker: Callable[..., Any], config: Mapping[str, Any]) -> list[str]:
    try:
        found = list(argument_problems(maker, config, given_by_us=0))
    except ValueError:  # a class written in C has no signature
        return []
    return [f"env_config.{name}: {problem} (of env_type {env_type})" for name, problem in found]


def _gem(env_type: str) -> Any:
    """Import GEM and check the id; raises `EnvironmentFailure` if GEM or the id is missing."""
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
