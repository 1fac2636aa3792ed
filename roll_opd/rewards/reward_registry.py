"""Registry `REWARDS`: find a reward by its registered name, by ROLL's class path, or by a dotted path.

A function is itself the reward. It is called with the samples and the configured arguments. A class is instantiated
once with these arguments, and the method `score` of the instance is the reward.

A function with the signature of verl or TRL is rejected. The error message contains the source code of an adapter.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from textwrap import indent
from typing import Any

from roll_opd.base.failures import EndpointError
from roll_opd.base.registry import Registry, arguments
from roll_opd.config.roll_keys import REWARD_CLASSES_OF_ROLL
from roll_opd.rewards.interface import RewardError, RewardFunction


@dataclass(frozen=True)
class RewardFacts:
    """Properties of a reward that the planner and the pipelines need."""

    needs_ground_truth: bool = False
    keeps_time: bool = False  # the reward sets a time limit itself; other rewards get `timeout` seconds per sample
    max_concurrency: int | None = None  # default number of concurrent calls; None: as many as the processes accept
    endpoint_arguments: frozenset[str] = frozenset()  # arguments only for a judge behind an API
    asks_a_service: bool = False  # calls go to another machine or cost money


REWARDS: Registry[RewardFacts] = Registry(
    kind="reward",
    made_of="function or class",
    example="mypackage.my_reward",
    error=RewardError,
    package="roll_opd.rewards.builtin",
    facts_type=RewardFacts,
    group="rewards",
    fallbacks={"math_rule": "math_verify"},
)
register = REWARDS.register


def reward_arguments(worker: str) -> dict[str, inspect.Parameter]:
    """Return the arguments of a reward that can be configured; raise the errors of `resolve`.

    The first argument of a function cannot be configured, because it is the samples. Positional-only arguments of a
    class cannot be configured either, because they are passed by the process that creates an instance.
    """
    found = _find(worker)
    return arguments(found, given_by_us=0 if inspect.isclass(found) else 1)


def resolve(worker: str, args: Mapping[str, Any] | None = None, *given: Any) -> RewardFunction:
    """Return a reward with its configured arguments bound.

    Raises `RewardError` with the known names if the reward is unknown.

    Args:
        worker: a registered name, a ROLL class path (`roll.pipeline....MathRuleRewardWorker`), or a dotted path to a
            user's function or class.
        args: the configured arguments.
        given: the first arguments of the constructor, if the reward is a class.
    """
    found = _checked(worker, args, given)
    if not inspect.isclass(found):
        return partial(found, **args) if args else found
    try:
        made: Any = found(*given, **(args or {}))
    except EndpointError as error:
        raise RewardError(str(error)) from None
    return getattr(made, "score", made)


def check(worker: str, args: Mapping[str, Any] | None = None) -> None:
    """Raise the errors of `resolve`.

    A built-in class is instantiated, so that it checks the requirements on the machine. A user's class is not
    instantiated, because its constructor could load a model.
    """
    if worker in REWARDS.builtin and REWARDS.find(worker).__module__.startswith("roll_opd."):
        resolve(worker, args)
    else:
        _checked(worker, args)


def _checked(worker: str, args: Mapping[str, Any] | None, given: tuple[Any, ...] = ()) -> Callable[..., Any]:
    """Return the function or the class of a reward.

    Raises `RewardError` if it cannot score samples, or if it does not accept the configured arguments.
    """
    found = _find(worker)
    is_class = inspect.isclass(found)
    if is_class and not {"score", "__call__"} & set(dir(found)):
        raise RewardError(
            f"reward {worker}: the class has no method score(samples); add this method, or use a function"
        )
    try:
        if not is_class and is_foreign(found, args or ()):
            raise RewardError(
                f"reward {worker}: its signature is {found.__name__}{inspect.signature(found)}, expected"
                " score(samples, **arguments) with a number for each sample; add this function to the module and use"
                f" it as the worker:\n{indent(adapter(found), ' ' * 8)}\n       "
            )
        inspect.signature(found).bind(*(given if is_class else ("samples",)), **(args or {}))
    except TypeError as error:
        made = "created" if is_class else "called"
        names = ", ".join(sorted(args or ())) or "none"  # values are not shown, as they may contain API keys
        raise RewardError(
            f"reward {worker}: cannot be {made} with the arguments of the configuration ({names}): {error}"
        ) from error
    except RewardError:
        raise
    except ValueError:  # a callable written in C has no signature
        pass
    return found


def _find(worker: str) -> Callable[..., Any]:
    if not worker.startswith("roll."):
        return REWARDS.find(worker)
    name = REWARD_CLASSES_OF_ROLL.get(worker.rpartition(".")[2])
    if name is None:
        known = REWARDS.known
        raise RewardError(f"{worker} has no counterpart here; known are {known}, or use a dotted path to your reward")
    return REWARDS.find(name)


def _by_name(names: Mapping[str, str]) -> dict[str, str]:
    return {name: field for field, of_field in names.items() for name in of_field.split()}


# name of the argument in verl, TRL and others -> field of `RewardSample`
_FIELD_OF = _by_name(
    {
        "response": "response solution_str completion answer prediction predict_str output model_output generated",
        "ground_truth": "ground_truth gt reference label target gold",
        "tag": "data_source task",
        "extra": "extra_info",
        "prompt": "prompt question query prompt_str",
    }
)
# the same in functions of batches
_BATCH_OF = _by_name(
    {
        "response": "completions responses solution_strs",
        "ground_truth": "ground_truths",
        "tag": "data_sources",
        "extra": "extra_infos",
        "prompt": "prompts queries",
    }
)
_NEVER_SAMPLES = {"completions", "prompts", "data_source", "data_sources", "solution_str", "solution_strs"}


def is_foreign(reward: Callable[..., Any], arguments: Collection[str] = ()) -> bool:
    """Return whether a function has the signature of another framework, such as verl or TRL.

    Args:
        arguments: names of the arguments that the configuration sets.
    """
    taken = [parameter for parameter in _named(reward) if parameter.name not in arguments]
    if not taken or taken[0].name in ("sample", "samples"):
        return False
    needed = [parameter for parameter in taken if parameter.default is parameter.empty]
    known = [parameter for parameter in needed if parameter.name in _FIELD_OF or parameter.name in _BATCH_OF]
    return taken[0].name in _NEVER_SAMPLES or (len(needed) > 1 and bool(known))


def adapter(reward: Callable[..., Any]) -> str:
    """Return the source code of an adapter for a reward function of another framework.

    The adapter is a function `score(samples)` that calls `reward` with the arguments in its signature.
    """
    name, parameters = reward.__name__, _named(reward)
    in_lists = any(parameter.name in _BATCH_OF for parameter in parameters)
    fields = _BATCH_OF if in_lists else _FIELD_OF
    given = []
    for parameter in parameters:
        if parameter.name in fields or parameter.default is parameter.empty:
            value = f"s.{fields[parameter.name]}" if parameter.name in fields else f"s.extra[{parameter.name!r}]"
            value = f"[{value} for s in samples]" if in_lists else value
            given.append(f"{parameter.name}={value}")
    call = f"{name}({', '.join(given)})"
    return f"def score(samples):\n    return {call if in_lists else f'[{call} for s in samples]'}"


def _named(reward: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(reward).parameters.values()
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
