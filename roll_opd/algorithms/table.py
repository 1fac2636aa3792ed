"""Advantages and policy losses by what a configuration calls them: a name of ours, a registered name, a dotted path.

What is known of them without calling them is data, in `config.algorithms`. A user's own function needs no more than
the signature of ours; `register_*` gives it a name.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from roll_opd.algorithms.baselines import Advantage
from roll_opd.algorithms.losses.table import PolicyLoss
from roll_opd.config.algorithms import ADVANTAGE_FUNCTIONS, POLICY_LOSS_FUNCTIONS, AlgorithmError
from roll_opd.extensions import Registry

register_advantage = ADVANTAGE_FUNCTIONS.register  # of f(RewardBatch, *, its arguments) -> Normalised
register_policy_loss = POLICY_LOSS_FUNCTIONS.register  # of f(LossBatch, *, its arguments) -> Tensor [M]


def advantage(name: str, arguments: Mapping[str, Any] | None = None) -> Advantage:
    """Return the function, after checking that it takes `arguments`. Raises `AlgorithmError`."""
    return _found(ADVANTAGE_FUNCTIONS, name, arguments or {})


def policy_loss(name: str, arguments: Mapping[str, Any] | None = None) -> PolicyLoss:
    """Return the function, after checking that it takes `arguments`. Raises `AlgorithmError`."""
    return _found(POLICY_LOSS_FUNCTIONS, name, arguments or {})


def _found(functions: Registry, name: str, arguments: Mapping[str, Any]) -> Any:
    function = functions.find(name)
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise AlgorithmError(f"{functions.kind} {name} cannot be called with {dict(arguments)}: {error}") from error
    return function
