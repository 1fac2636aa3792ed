"""Find a reward by what a configuration calls it: a registered name, ROLL's class path, or a dotted path.

A function is the reward itself, called with the arguments of the configuration; a class is made once with them, and
its method `score` is the reward.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from textwrap import indent
from typing import Any

from roll_opd.base.registry import Registry, arguments
from roll_opd.config.roll_keys import REWARD_CLASSES_OF_ROLL
from roll_opd.rewards.interface import Reward, RewardError
from roll_opd.rewards.signature import adapter, is_foreign


@dataclass(frozen=True)
class RewardFacts:
    """What a configuration must know of a reward besides its arguments."""

    needs_ground_truth: bool = False  # every row must have one
    keeps_time: bool = False  # it limits its own time; others have `timeout` seconds a sample
    max_concurrency: int | None = None  # calls under way at once by default; None: as many as the processes take
    endpoint_arguments: frozenset[str] = frozenset()  # those that only a judge behind an endpoint has
    asks_a_service: bool = False  # a call leaves this machine, or costs money


REWARDS: Registry[RewardFacts] = Registry(
    kind="reward",
    made_of="function or class",
    example="mypackage.my_reward",
    error=RewardError,
    package="roll_opd.rewards.builtin",
    facts_type=RewardFacts,
)
register = REWARDS.register


def reward_arguments(worker: str) -> dict[str, inspect.Parameter]:
    """Return the arguments that a configuration may give the reward that `worker` names. Raises as `resolve` does.

    A function's first argument is the samples; a class's positional-only ones come from the process that makes it.
    """
    found = _find(worker)
    return arguments(found, given_by_us=0 if inspect.isclass(found) else 1)


def resolve(worker: str, args: Mapping[str, Any] | None = None, *given: Any) -> Reward:
    """Return the reward that `worker` names, with `args` bound to it.

    `worker` is a registered name, a path of ROLL's (`roll.pipeline....MathRuleRewardWorker`) or a dotted path to a
    function or class of the user's own. A class is made with `given` first. Raises `RewardError` that says what was
    looked for and what is known.
    """
    found = _checked(worker, args, given)
    if not inspect.isclass(found):
        return partial(found, **args) if args else found
    made: Any = found(*given, **(args or {}))
    return getattr(made, "score", made)


def check(worker: str, args: Mapping[str, Any] | None = None) -> None:
    """Raise what `resolve` would. Of classes only the built-in ones are made, to see whether this machine has what they
    need; a user's own may load a model.
    """
    if worker in REWARDS.builtin:
        resolve(worker, args)
    else:
        _checked(worker, args)


def _checked(worker: str, args: Mapping[str, Any] | None, given: tuple[Any, ...] = ()) -> Callable[..., Any]:
    """Return the function or class that `worker` names; `RewardError` where it cannot score or does not take `args`."""
    found = _find(worker)
    is_class = inspect.isclass(found)
    if is_class and not {"score", "__call__"} & set(dir(found)):
        raise RewardError(f"reward {worker}: the class has no method score(samples); write one, or use a function")
    try:
        if not is_class and is_foreign(found, args or ()):
            raise RewardError(
                f"reward {worker}: its signature is {found.__name__}{inspect.signature(found)}, expected"
                " score(samples, **arguments) with a number for each sample; add this to the module and name"
                f" score as the worker:\n{indent(adapter(found), ' ' * 8)}\n       "
            )
        inspect.signature(found).bind(*(given if is_class else ("samples",)), **(args or {}))
    except TypeError as error:
        made = "made" if is_class else "called"
        names = ", ".join(sorted(args or ())) or "none"  # without values: API keys may be among them
        raise RewardError(
            f"reward {worker}: cannot be {made} with the arguments of the configuration ({names}): {error}"
        ) from error
    except RewardError:
        raise
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
