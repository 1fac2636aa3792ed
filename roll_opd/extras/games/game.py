"""`Game`: base class of the built-in games, with turn limits and the `info` of a turn.

The module also parses the actions of a response and checks the tables of symbols and actions in a configuration.
"""

import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import regex

from roll_opd.extras.games.environment_interface import Environment, EnvironmentFailure, Reset, Step

PATTERN = "<answer>(.*?)</answer>"
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
SECONDS = 1.0  # timeout of a search, against catastrophic backtracking
MAX_CHARACTERS = 32_768  # only the last characters of a response are searched


@dataclass(frozen=True)
class Action:
    """An action parsed from a response."""

    action: Any | None  # key in the action table, or the text if there is no table; None: invalid
    content: str = ""  # text of the response
    thought: str = ""

    @property
    def info(self) -> dict[str, Any]:
        """The entries of `info`, with ROLL's keys."""
        return {"action": self.action, "action_content": self.content, "think_content": self.thought}


INVALID = Action(None)


class ActionReader:
    """Parser of actions with a regular expression.

    A pattern with one group captures the action. A pattern with two groups captures the thought and then the action.
    """

    def __init__(
        self, pattern: str, lookup: Mapping[Any, str] | None = None, special_tokens: Sequence[str] | None = None
    ) -> None:
        """Create a parser.

        `lookup` maps keys to the names of actions, which are case-insensitive. Without `lookup`, any non-empty text is
        an action. Raises `EnvironmentFailure` for an invalid pattern and for duplicate names.
        """
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise EnvironmentFailure(f"action_pattern {pattern!r} is not a regular expression: {error}") from None
        if self._pattern.groups not in (1, 2):
            raise EnvironmentFailure(
                f"action_pattern {pattern!r} has {self._pattern.groups} groups; write one group for the action, or"
                " two groups for thought and action"
            )
        self._keys = None if lookup is None else {name.strip().lower(): key for key, name in lookup.items()}
        if lookup is not None and len(self._keys or ()) != len(lookup):
            raise EnvironmentFailure(f"action_lookup gives two actions one name: {dict(lookup)}; names must differ")
        self._special_tokens = [token for token in special_tokens or () if token]

    def add_names(self, names: Mapping[str, Any]) -> None:
        """Add alternative names of actions, as a dict: lower-case name -> key."""
        self._keys = {**names, **(self._keys or {})}

    def read(self, response: Any) -> Action:
        """Return the first action in a response, or INVALID if there is none, for example because it is not a text."""
        if not isinstance(response, str):
            return INVALID
        for token in self._special_tokens:
            response = response.replace(token, "")
        try:
            found = self._pattern.search(response.strip()[-MAX_CHARACTERS:], timeout=SECONDS)
        except TimeoutError:
            return INVALID
        if found is None:
            return INVALID
        *thoughts, content = [(group or "").strip() for group in found.groups()]
        action = (content or None) if self._keys is None else self._keys.get(content.lower())
        return Action(action, content, "".join(thoughts))


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
