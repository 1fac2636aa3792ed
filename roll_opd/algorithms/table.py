"""Advantages and policy losses by what a configuration calls them: a name of ours, a registered name, a dotted path.

What is known of them without calling them is data, in `config.algorithms`. A user's own function needs no more than
the signature of ours; `register_*` gives it a name.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from roll_opd.algorithms.baselines import ADVANTAGES, Advantage
from roll_opd.algorithms.losses.table import POLICY_LOSSES, PolicyLoss
from roll_opd.config.extension import ExtensionError, register, resolve

ADVANTAGE, POLICY_LOSS = "advantage", "policy loss"


def register_advantage(name: str) -> Callable[[Advantage], Advantage]:
    """Make `f(RewardBatch, *, arguments) -> Normalised` known as `name`."""
    return register(ADVANTAGE, name)


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Make `f(LossBatch, *, arguments) -> Tensor [M]` known as `name`."""
    return register(POLICY_LOSS, name)


def advantage(name: str, arguments: Mapping[str, Any] | None = None) -> Advantage:
    """Return the function, after checking that it takes `arguments`. Raises `ExtensionError`."""
    return _checked(ADVANTAGE, name, resolve(ADVANTAGE, name, ADVANTAGES), arguments or {})


def policy_loss(name: str, arguments: Mapping[str, Any] | None = None) -> PolicyLoss:
    """Return the function, after checking that it takes `arguments`. Raises `ExtensionError`."""
    return _checked(POLICY_LOSS, name, resolve(POLICY_LOSS, name, POLICY_LOSSES), arguments or {})


def _checked(kind: str, name: str, function: Any, arguments: Mapping[str, Any]) -> Any:
    if not callable(function):
        raise ExtensionError(f"{kind} {name} is no function but {type(function).__name__}")
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise ExtensionError(f"{kind} {name} cannot be called with {dict(arguments)}: {error}") from error
    return function
