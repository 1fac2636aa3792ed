"""The arguments that a configuration gives a reward, checked where the reward is made."""

import math
from collections.abc import Collection
from typing import TypeVar

from roll_opd.rewards.interface import RewardError

Name = TypeVar("Name", bound=str)


def flag(reward: str, key: str, value: object) -> bool:
    """Return `value`, true or false; `RewardError` where it is neither."""
    if not isinstance(value, bool):
        raise RewardError(f"reward {reward}: {key} is {value!r}; write true or false")
    return value


def choice(reward: str, key: str, value: Name, known: Collection[Name]) -> Name:
    """Return `value`, one of the `known` names; `RewardError` where it is none of them."""
    if not isinstance(value, str) or value not in known:
        raise RewardError(f"reward {reward}: {key} is {value!r}; write one of {', '.join(known)}")
    return value


def number(reward: str, key: str, value: object, least: float = -math.inf) -> float:
    """Return `value` as a finite number of at least `least`; `RewardError` where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise RewardError(f"reward {reward}: {key} is {value!r}; write a number{bound}")
    return float(value)
