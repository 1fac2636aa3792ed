"""Hold what an environment returns against the contract, and write numpy's numbers as Python's."""

import math
from typing import Any

from roll_opd.environments.interface import EnvironmentFailure, Reset, Step


def read_reset(returned: Any, name: str) -> Reset:
    """Return what `reset` returned as (text, info); `EnvironmentFailure` where it is something else."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise EnvironmentFailure(f"{name}: reset returned {_kind(returned)}; return (observation, info)")
    return _text(returned[0], name, "reset"), _info(returned[1], name, "reset")


def read_step(returned: Any, name: str) -> Step:
    """Return what `step` returned as (text, finite reward, two truth values, info); `EnvironmentFailure` where not."""
    if not isinstance(returned, tuple | list) or len(returned) != 5:
        raise EnvironmentFailure(
            f"{name}: step returned {_kind(returned)}; return (observation, reward, terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, info = returned
    try:
        number = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvironmentFailure(f"{name}: step returned the reward {_short(reward)}; return a finite number")
    return (
        _text(observation, name, "step"),
        number,
        _truth(terminated, name, "terminated"),
        _truth(truncated, name, "truncated"),
        _info(info, name, "step"),
    )


def _text(value: Any, name: str, method: str) -> str:
    if not isinstance(value, str):
        raise EnvironmentFailure(f"{name}: {method} returned the observation {_kind(value)}; return a text")
    return value


def _truth(value: Any, name: str, which: str) -> bool:
    try:
        plain = getattr(value, "item", lambda: value)()  # numpy's
    except (TypeError, ValueError):  # of several values
        plain = None
    if not isinstance(plain, int) or plain not in (0, 1):
        raise EnvironmentFailure(f"{name}: step returned {which} as {_short(value)}; return True or False")
    return bool(plain)


def _info(value: Any, name: str, method: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise EnvironmentFailure(f"{name}: {method} returned info as {_kind(value)}; return a dict")
    return dict(value or {})


def _short(value: Any) -> str:
    return repr(value)[:60]


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{size}"
