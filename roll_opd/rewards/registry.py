"""From what a configuration calls a reward to the function: a registered name, ROLL's class path, or a dotted
path.

A function is the reward itself, with the arguments of the configuration; a class is made once with them, and
its method `score` is the reward.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from roll_opd.config.known_names import REWARD_CLASSES_OF_ROLL
from roll_opd.extensions import Registry
from roll_opd.rewards.interface import Reward, RewardError

REWARDS = Registry(
    kind="reward",
    made_of="function or class",
    example="mypackage.my_reward",
    error=RewardError,
    package="roll_opd.rewards.builtin",
    facts_type=dict,
    one_per_module=True,
)
register = REWARDS.register


def resolve(worker: str, args: Mapping[str, Any] | None = None) -> Reward:
    """The reward that `worker` names, with `args` bound to it.

    `worker` is a registered name, a path of ROLL's (`roll.pipeline....MathRuleRewardWorker`) or a dotted path
    to a function or class of the user's own. Raises `RewardError` that says what was looked for and what is
    known.
    """
    found = _fitting(worker, args)
    if not inspect.isclass(found):
        return partial(found, **args) if args else found
    reward = found(**(args or {}))
    return getattr(reward, "score", reward)


def check(worker: str, args: Mapping[str, Any] | None = None) -> None:
    """Raise what `resolve` would. Of classes only ours are made, which say what they need of the machine: a user's
    own may load a model.
    """
    if worker in REWARDS.builtin:
        resolve(worker, args)
    else:
        _fitting(worker, args)


def _fitting(worker: str, args: Mapping[str, Any] | None) -> Callable[..., Any]:
    """The function or class that `worker` names, where it takes `args` and can score."""
    found = _find(worker)
    is_class = inspect.isclass(found)
    if is_class and not {"score", "__call__"} & set(dir(found)):
        raise RewardError(f"reward {worker}: the class has no method score(samples); write one, or use a function")
    try:
        inspect.signature(found).bind(*(() if is_class else ("samples",)), **(args or {}))
    except TypeError as error:
        made = "made" if is_class else "called"
        given = sorted(args or ())  # the names alone: a value may be a key
        raise RewardError(f"reward {worker}: cannot be {made} with {given}: {error}") from error
    except ValueError:  # written in C, it has no signature that could be checked
        pass
    return found


def _find(worker: str) -> Callable[..., Any]:
    if not worker.startswith("roll."):
        return REWARDS.find(worker)
    name = REWARD_CLASSES_OF_ROLL.get(worker.rpartition(".")[2])
    if name is None:
        known = REWARDS.known
        raise RewardError(f"{worker} has no counterpart here; known are {known}, or give a dotted path of your own")
    return REWARDS.find(name)
