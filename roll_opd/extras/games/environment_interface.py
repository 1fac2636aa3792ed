"""`Environment` base class with `reset` and `step` as in GEM (https://github.com/axon-rl/gem), and its registry.

Optional keys of `info`:

- `env_instruction` (`reset`): a text before the first observation.
- `suffix` (`reset` and `step`): a text for the next prompt.
- `metrics` (`step`): a map from names to numbers or bools.
- `metrics_agg_mode` (`step`): a map from the same names to the aggregation over the turns of an episode ("mean", "sum",
  "last", "max", "min").
- `action_desc` (`step`): a sentence about the action's effect.
- `use_tool` (`step`): whether the observation is a tool's output.
"""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from statistics import fmean
from typing import Any

from roll_opd.base.registry import Registry

Reset = tuple[str, dict[str, Any]]  # observation, info
Step = tuple[str, float, bool, bool, dict[str, Any]]  # observation, reward, terminated, truncated, info


STEP = ("observation", "reward", "terminated", "truncated", "info")  # the values that `step` returns


class EnvironmentFailure(ValueError):
    """Raised if an environment cannot be found, created or stepped.

    The message has the name of the environment, the place of the problem and a remedy.
    """


class Environment:
    """Base class of environments. Implement `reset` and `step`; an instance plays one episode at a time."""

    def reset(self, seed: int | None = None) -> Reset:
        """Start an episode; return (observation, info). The same seed starts the same episode."""
        raise NotImplementedError(f"{type(self).__name__} has no method `reset`; write reset(seed) -> (text, info)")

    def step(self, action: str) -> Step:
        """Process a response of the model; return (observation, reward, terminated, truncated, info).

        `terminated`: the episode ended by the game's rules. `truncated`: a limit ended the episode. In both cases, only
        `reset` may be called next.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `step`; write step(action) -> five values")

    def close(self) -> None:
        """Release the environment's resources."""


ENVIRONMENTS: Registry[dict] = Registry(
    kind="environment",
    made_of="class",
    example="my_envs.MyGame",
    error=EnvironmentFailure,
    package="roll_opd.extras.games",
    facts_type=dict,
    decorator="ENVIRONMENTS.register",
    group="environments",
)


# value of `metrics_agg_mode` -> function that aggregates over the turns of an episode
AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean,
    "sum": sum,
    "last": lambda values: values[-1],
    "max": max,
    "min": min,
}


def read_reset(returned: Any, name: str) -> Reset:
    """Return the result of `reset` as (text, info). Raises `EnvironmentFailure` if the result has another form."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise EnvironmentFailure(f"{name}: reset returned {_kind(returned)}; return (observation, info)")
    return _text(returned[0], name, "reset"), _info(returned[1], name, "reset")


def read_step(returned: Any, name: str) -> Step:
    """Return the result of `step` as (observation, reward, terminated, truncated, info).

    Raises `EnvironmentFailure` if the result has another form, or if the reward is not a finite number.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 5:
        raise EnvironmentFailure(
            f"{name}: step returned {_kind(returned)}; return (observation, reward, terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, info = returned
    what = f"{name}: step returned the reward {_short(reward)}"
    number = _number(reward, what)
    if not math.isfinite(number):
        raise EnvironmentFailure(f"{what}; return a finite number")
    return (
        _text(observation, name, "step"),
        number,
        _bool(terminated, name, "terminated"),
        _bool(truncated, name, "truncated"),
        _info(info, name, "step"),
    )


def _text(value: Any, name: str, method: str) -> str:
    if not isinstance(value, str):
        raise EnvironmentFailure(f"{name}: {method} returned the observation {_kind(value)}; return a string")
    return value


def _bool(value: Any, name: str, which: str) -> bool:
    plain = _plain(value)
    if not isinstance(plain, int) or plain not in (0, 1):
        raise EnvironmentFailure(f"{name}: step returned {which} as {_short(value)}; return True or False")
    return bool(plain)


def _info(value: Any, name: str, method: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise EnvironmentFailure(f"{name}: {method} returned info as {_kind(value)}; return a dict")
    info = dict(value or {})
    for key, read in (("metrics", _number), ("metrics_agg_mode", _mode)):
        found = info.get(key)
        if found is not None and not isinstance(found, Mapping):
            raise EnvironmentFailure(f"{name}: {method} returned info[{key!r}] as {_kind(found)}; return a dict")
        if found is not None:
            info[key] = {
                str(metric): read(one, f"{name}: {method} returned info[{key!r}][{metric!r}] as {_short(one)}")
                for metric, one in found.items()
            }
    return info


def _number(value: Any, what: str) -> float:
    plain = _plain(value)
    try:
        if isinstance(plain, Real):
            return float(plain)
    except OverflowError:
        pass
    raise EnvironmentFailure(f"{what}; return a number or a bool")


def _mode(value: Any, what: str) -> str:
    if not isinstance(value, str) or value not in AGGREGATIONS:
        raise EnvironmentFailure(f"{what}; return one of {', '.join(AGGREGATIONS)}")
    return value


def _plain(value: Any) -> Any:
    """Return the Python value of a numpy or torch scalar, or None for an array."""
    try:
        return getattr(value, "item", lambda: value)()
    except (TypeError, ValueError, RuntimeError):
        return None


def _short(value: Any) -> str:
    return repr(value)[:60]


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{size}"
