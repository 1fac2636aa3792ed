"""`Game`: base of the built-in games, with turn limits, action parsing, and the `info` of a turn."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_opd.environments.actions import ActionReader
from roll_opd.environments.interface import Environment, EnvironmentFailure, Reset, Step

# `metrics_agg_mode` of the games
AGGREGATES = {"success": "last", "action_is_valid": "mean", "action_is_effective": "mean", "format_penalty": "mean"}


@dataclass(frozen=True)
class Turn:
    """Outcome of one action."""

    reward: float = 0.0
    effective: bool = False  # the state changed
    over: bool = False  # the game has ended
    truncated: bool = False  # ended by the game's own limit


class Game(Environment, ABC):
    """Turn-based game. A subclass implements `begin`, `play`, `render` and `succeeded`."""

    def __init__(
        self,
        *,
        instruction: str,
        action_lookup: Mapping[Any, str] | None,
        max_steps: int,
        format_penalty: float,
        action_pattern: str,
        special_token_list: Sequence[str] | None,
    ) -> None:
        """`instruction` opens an episode; `format_penalty` (negative) is the reward of a turn without valid action."""
        at_least("max_steps", max_steps, 1)
        self._instruction, self._max_steps, self._format_penalty = instruction, max_steps, float(format_penalty)
        self._names = action_lookup
        self._reader = ActionReader(action_pattern, action_lookup, special_token_list)
        self._turn, self._playing = 0, False

    @abstractmethod
    def begin(self, seed: int | None) -> None:
        """Set up the initial state."""

    @abstractmethod
    def play(self, action: Any) -> Turn:
        """Play a valid action."""

    def idle(self) -> Turn:
        """Take a turn without a valid action."""
        return Turn()

    @abstractmethod
    def render(self) -> str:
        """Return the observation text."""

    @property
    @abstractmethod
    def succeeded(self) -> bool:
        """Whether the game is won."""

    def reset(self, seed: int | None = None) -> Reset:
        """Start the episode of `seed`, or a random one."""
        self.begin(checked_seed(seed))
        self._turn, self._playing = 0, True
        return self.render(), {"env_instruction": self._instruction}

    def step(self, action: str) -> Step:
        """Play the action in a response; raises `EnvironmentFailure` outside of an episode."""
        if not self._playing:
            raise EnvironmentFailure(f"{type(self).__name__}: no episode is active; call reset")
        self._turn += 1
        read = self._reader.read(action)
        valid = read.action is not None
        turn = self.play(read.action) if valid else self.idle()
        penalty = 0.0 if valid else self._format_penalty
        truncated = turn.truncated or (not turn.over and self._turn >= self._max_steps)
        self._playing = not (turn.over or truncated)
        metrics = {
            "success": self.succeeded,
            "action_is_valid": valid,
            "action_is_effective": turn.effective,
            "format_penalty": penalty,
        }
        info = {
            "metrics": metrics,
            "metrics_agg_mode": dict(AGGREGATES),
            "action_desc": self._described(read.content, valid, turn),
            **read.info,
        }
        return self.render(), turn.reward + penalty, turn.over, truncated, info

    def _described(self, content: str, valid: bool, turn: Turn) -> str:
        if not valid:
            return f"Turn {self._turn}: there was no valid action."
        return f"Turn {self._turn}: {content}, which {'had an effect' if turn.effective else 'changed nothing'}."


def checked_seed(seed: int | None) -> int | None:
    """Return a seed for numpy; raises `EnvironmentFailure` unless it is an integer of at least 0."""
    try:
        number = None if seed is None else operator.index(seed)
    except TypeError:
        number = -1
    if number is not None and number < 0:
        raise EnvironmentFailure(f"seed is {seed!r}; set an integer of at least 0")
    return number


def random_numbers(seed: int | None) -> np.random.Generator:
    """Return a random generator that is reproducible in any process."""
    return np.random.default_rng(seed)


def at_least(name: str, value: float, least: float) -> None:
    """Raise `EnvironmentFailure` if an argument is below `least`."""
    if not value >= least:
        raise EnvironmentFailure(f"{name} is {value!r}; set a number of at least {least:g}")
