"""Validators for the configured arguments of a reward."""

import math
from collections.abc import Collection
from typing import TypeVar

from roll_opd.rewards.interface import RewardError

Name = TypeVar("Name", bound=str)


def flag(reward: str, key: str, value: object) -> bool:
    """Return a bool argument; raises `RewardError` for other types."""
    if not isinstance(value, bool):
        raise RewardError(f"reward {reward}: {key} is {value!r}; write true or false")
    return value


def choice(reward: str, key: str, value: Name, known: Collection[Name]) -> Name:
    """Return an argument that is one of the `known` names; raises `RewardError` for others."""
    if not isinstance(value, str) or value not in known:
        raise RewardError(f"reward {reward}: {key} is {value!r}; write one of {', '.join(known)}")
    return value


def number(reward: str, key: str, value: object, least: float = -math.inf) -> float:
    """Return an argument as a finite number of at least `least`; raises `RewardError` for others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise RewardError(f"reward {reward}: {key} is {value!r}; write a number{bound}")
    return float(value)
