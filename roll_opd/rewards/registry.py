"""From what a configuration calls a reward to the function: a registered name, ROLL's class path, or a dotted
path.

A function is the reward itself; a class is made once, with the arguments of the configuration, and its
instance is the reward.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from roll_opd.rewards.interface import Reward, RewardError

_REGISTERED: dict[str, Callable[..., Any]] = {}

# Modules that register the rewards of this package, by the name they register
_OURS = {"math_rule": "roll_opd.rewards.math_rule"}

# ROLL's reward worker classes -> the reward that plays the same role here
ROLL_CLASSES = {"MathRuleRewardWorker": "math_rule"}

Registered = TypeVar("Registered", bound=Callable[..., Any])


def register(name: str) -> Callable[[Registered], Registered]:
    """Make a function or class known as `name`; `RewardError` where another one has the name."""

    def decorate(reward: Registered) -> Registered:
        known = _REGISTERED.setdefault(name, reward)
        if known is not reward and (known.__module__, known.__qualname__) != (
            reward.__module__,
            reward.__qualname__,
        ):
            raise RewardError(f"a reward named {name!r} is already registered: {known.__module__}.{known.__qualname__}")
        _REGISTERED[name] = reward
        return reward

    return decorate


def resolve(worker: str, args: Mapping[str, Any] | None = None) -> Reward:
    """The reward that `worker` names, with `args` bound to it.

    `worker` is a registered name, a path of ROLL's (`roll.pipeline....MathRuleRewardWorker`) or a dotted path
    to a function or class of the user's own. Raises `RewardError` that says what was looked for and what is
    known.
    """
    found = _find(worker)
    if inspect.isclass(found):
        try:
            return found(**(args or {}))
        except TypeError as error:
            raise RewardError(f"reward {worker}: cannot be made with {dict(args or {})}: {error}") from error
    return partial(found, **args) if args else found


def _find(worker: str) -> Callable[..., Any]:
    name = ROLL_CLASSES.get(worker.rpartition(".")[2], worker) if worker.startswith("roll.") else worker
    if name in _OURS:
        importlib.import_module(_OURS[name])
    if name in _REGISTERED:
        return _REGISTERED[name]
    known = ", ".join(sorted({*_OURS, *_REGISTERED}))
    if worker.startswith("roll."):
        raise RewardError(f"{worker} has no counterpart here yet; known are {known}, or give a dotted path of your own")
    if "." not in worker:
        raise RewardError(f"unknown reward {worker!r}; known are {known}, or a dotted path such as mypackage.my_reward")
    return _import(worker)


def _import(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RewardError(f"reward {path}: the module {module_name} cannot be imported: {error}") from error
    found = vars(module).get(attribute)
    if not callable(found):
        raise RewardError(f"reward {path}: {module_name} has no function or class named {attribute}")
    return found
