"""`Game`: base class of the built-in games, with turn limits and the `info` of a turn.

The module also checks the tables of symbols and actions in a configuration.
"""

import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from roll_opd.extras.games.action_reader import PATTERN, SPECIAL_TOKENS, ActionReader
from roll_opd.extras.games.environment_interface import Environment, EnvironmentFailure, Reset, Step

TEXT = "text"  # the only render mode


def numbered(name: str, table: Mapping[Any, str], known: Collection[int]) -> dict[int, str]:
    """Return `table` with integers as keys. Raises `EnvironmentFailure` unless all keys are in `known`.

    The keys of the given table may be integers or texts.
    """
    try:
        found = {int(key): str(value) for key, value in table.items()}
    except (TypeError, ValueError):
        found = {}
    if not found or not found.keys() <= set(known):
        numbers = ", ".join(map(str, sorted(known)))
        raise EnvironmentFailure(f"{name} is {dict(table)!r}; map numbers to texts; valid numbers are {numbers}")
    return found


def complete(name: str, table: Mapping[Any, str] | None, default: Mapping[int, str]) -> dict[int, str]:
    """Return the configured table of symbols. Missing symbols get the defaults."""
    return {**default, **numbered(name, table, default)} if table is not None else dict(default)


def only_text(render_mode: str) -> None:
    """Raise `EnvironmentFailure` unless the render mode is text."""
    if render_mode != TEXT:
        raise EnvironmentFailure(f"render_mode is {render_mode!r}; set {TEXT}: images are not supported")


# `metrics_agg_mode` of the games
AGGREGATES = {"success": "last", "action_is_valid": "mean", "action_is_effective": "mean", "format_penalty": "mean"}


@dataclass(frozen=True)
class Turn:
    """The outcome of one action."""

    reward: float = 0.0
    effective: bool = False  # the state changed
    over: bool = False  # the game has ended
    truncated: bool = False  # ended by a limit of the game itself


@dataclass(kw_only=True, eq=False)
class Game(Environment, ABC):
    """A turn-based game. Subclasses are dataclasses whose fields are the arguments of the game.

    They implement `begin`, `play`, `render` and `succeeded`. Their `__post_init__` calls `set_up`.

    - `env_instruction`: text that opens an episode, in place of the game's own instruction.
    - `format_penalty`: negative reward of a turn without a valid action.
    """

    max_steps: int
    env_instruction: str | None = None
    format_penalty: float = 0.0
    action_pattern: str = PATTERN
    special_token_list: Sequence[str] | None = SPECIAL_TOKENS

    def set_up(
        self, instruction: str, actions: Mapping[Any, str] | None = None, symbols: Mapping[str, str] | None = None
    ) -> None:
        """Check the common arguments, and prepare the game.

        - `instruction`: the game's own instruction.
        - `actions`: the names of the actions by key; None if any text is an action.
        - `symbols`: the meanings of the symbols, which follow the instruction together with the names of the actions.
        """
        at_least("max_steps", self.max_steps, 1)
        self._instruction = instruction if self.env_instruction is None else self.env_instruction
        if self._instruction and symbols and actions:  # an empty instruction disables the explanation
            meanings = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in symbols.items())
            self._instruction += f"\nSymbols: {meanings}\nActions: {', '.join(actions.values())}"
        self._names = actions
        self._reader = ActionReader(self.action_pattern, actions, self.special_token_list)
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
        """Start the episode of `seed`. Without a seed, a random episode starts."""
        self.begin(checked_seed(seed))
        self._turn, self._playing = 0, True
        return self.render(), {"env_instruction": self._instruction}

    def step(self, action: str) -> Step:
        """Play the action in a response. Raises `EnvironmentFailure` if no episode is active."""
        if not self._playing:
            raise EnvironmentFailure(f"{type(self).__name__}: no episode is active; call reset")
        self._turn += 1
        read = self._reader.read(action)
        valid = read.action is not None
        turn = self.play(read.action) if valid else self.idle()
        penalty = 0.0 if valid else float(self.format_penalty)
        truncated = turn.truncated or (not turn.over and self._turn >= self.max_steps)
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


State = TypeVar("State", bound=Hashable)
MAX_STATES = 300_000  # maximum number of states that `shortest_way` searches


def shortest_way(
    start: State, actions: Iterable[int], after: Callable[[State, int], State], is_goal: Callable[[State], bool]
) -> list[int] | None:
    """Return the actions of a shortest way from a state to a goal, or None if there is no way.

    Raises `EnvironmentFailure` if there are too many states to search.

    Args:
        after: function (state, action) that returns the next state; an action without effect returns the same state.
    """
    actions = list(actions)
    came: dict[State, tuple[int, State] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        if is_goal(state):
            way = []
            while step := came[state]:
                way.append(step[0])
                state = step[1]
            return way[::-1]
        if len(came) > MAX_STATES:
            raise EnvironmentFailure(
                f"the game has more than {MAX_STATES} states; solve games with fewer objects or cells"
            )
        for action in actions:
            if (reached := after(state, action)) not in came:
                came[reached] = (action, state)
                waiting.append(reached)
    return None


def checked_seed(seed: int | None) -> int | None:
    """Return a seed for numpy. Raises `EnvironmentFailure` unless the seed is None or an integer of at least 0."""
    try:
        number = None if seed is None else operator.index(seed)
    except TypeError:
        number = -1
    if number is not None and number < 0:
        raise EnvironmentFailure(f"seed is {seed!r}; set an integer of at least 0")
    return number


def random_numbers(seed: int | None) -> np.random.Generator:
    """Return a random generator. The same seed gives the same numbers in every process."""
    return np.random.default_rng(seed)


def at_least(name: str, value: float, least: float) -> None:
    """Raise `EnvironmentFailure` if the argument `name` has a value below `least`."""
    if not value >= least:
        raise EnvironmentFailure(f"{name} is {value!r}; set a number of at least {least:g}")
