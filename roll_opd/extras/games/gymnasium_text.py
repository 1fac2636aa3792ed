"""Gymnasium games (https://gymnasium.farama.org) with discrete actions as text environments, mainly toy_text.

A state is rendered in mode `ansi` if the game supports this mode. Otherwise the raw observation is shown.
"""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_opd.extras.games.action_reader import PATTERN, SPECIAL_TOKENS
from roll_opd.extras.games.environment_interface import ENVIRONMENTS, EnvironmentFailure
from roll_opd.extras.games.game import Game, Turn, numbered

HIGHLIGHT = re.compile(r"\x1b\[[\d;]*m(.)\x1b\[0m")  # marks the player's position
ESCAPE = re.compile(r"\x1b\[[\d;]*m")
ENDLESS = 10**9  # max_steps if only the limit of the game itself applies
SAYS_ACTION = re.compile(r"^ *\(\w[\w ]*\)$\n?", re.MULTILINE)  # line with the last action


def _passenger(env: Any, observation: Any) -> str:
    """Return the positions in Taxi as text, because the map shows them by colour only."""
    row, column, passenger, destination = map(int, env.unwrapped.decode(observation))
    names = ("R", "G", "Y", "B")
    waits = f"waits at {names[passenger]}" if passenger < len(names) else "is in the taxi"
    return (
        f"The taxi is in row {row}, column {column}, counted from 0. The passenger {waits} and wants to"
        f" {names[destination]}."
    )


def _cards(_: Any, observation: Any) -> str:
    total, dealer, ace = observation
    return f"Your cards sum to {total}{', with a usable ace' if ace else ''}. The dealer shows {dealer}."


@dataclass(frozen=True)
class Known:
    """Texts that describe a gymnasium game."""

    actions: tuple[str, ...]
    instruction: str
    says: Callable[[Any, Any], str] | None = None  # (env, observation) -> sentence after the map or instead of it
    success_is_end: bool = False  # termination means success; else success is a positive reward


KNOWN = {
    "FrozenLake": Known(
        ("left", "down", "right", "up"),
        "Walk from S over ice (F) to the goal (G), and do not fall into a hole (H). [ ] is around your cell.",
    ),
    "Taxi": Known(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "Drive the taxi to the passenger, pick them up, and drop them off where they want to go. | is a wall.",
        _passenger,
    ),
    "CliffWalking": Known(
        ("up", "right", "down", "left"),
        "Walk from your cell (x) to the goal (T), and do not step off the cliff (C), which sends you back.",
        success_is_end=True,
    ),
    "Blackjack": Known(
        ("stick", "hit"), "Come closer to 21 than the dealer, and not above it: hit takes a card, stick ends.", _cards
    ),
}


@ENVIRONMENTS.register("gymnasium")
class GymnasiumText(Game):
    """A gymnasium game, such as `gymnasium:Taxi-v3`. The game determines the rewards and the end of an episode."""

    def __init__(
        self,
        game: str,
        max_steps: int | None = None,
        action_lookup: Mapping[Any, str] | None = None,
        env_instruction: str | None = None,
        format_penalty: float = 0.0,
        action_pattern: str = PATTERN,
        special_token_list: Sequence[str] | None = SPECIAL_TOKENS,
        **options: Any,
    ) -> None:
        """Create the game with the id `game`.

        - `max_steps`: limit of turns, in addition to limits of the game.
        - `options`: arguments for `gymnasium.make`.

        An action can be given by its name or its number.
        """
        self._game = game
        self._known = KNOWN.get(game.rpartition("/")[2].partition("-")[0])
        self._env = _made(game, options)
        space = self._env.action_space
        if type(space).__name__ != "Discrete":
            raise EnvironmentFailure(
                f"gymnasium:{game}: its actions are {space}; only Discrete action spaces are supported"
            )
        numbers = range(int(space.start), int(space.start + space.n))
        names = dict(zip(numbers, self._known.actions if self._known else map(str, numbers), strict=True))
        if action_lookup is not None:
            names.update(numbered("action_lookup", action_lookup, numbers))
        own = self._known.instruction if self._known else f"You are playing {game}."
        description = own if env_instruction is None else env_instruction
        form = f"Give one action a turn, in this form: <answer>{names[numbers[0]]}</answer>"
        super().__init__(
            max_steps=ENDLESS if max_steps is None else max_steps,
            format_penalty=format_penalty,
            action_pattern=action_pattern,
            special_token_list=special_token_list,
        )
        self.set_up(f"{description}\n{form}\nActions: {', '.join(names.values())}", names)
        self._reader.add_names({str(number): number for number in numbers})

    def begin(self, seed: int | None) -> None:
        """Start the game."""
        self._observation, _ = self._env.reset(seed=seed)
        self._won = False

    def play(self, action: int) -> Turn:
        """Play an action."""
        before = self._shown()
        self._observation, reward, terminated, truncated, _ = self._env.step(action)
        self._won = bool(terminated) and (reward > 0 or (self._known is not None and self._known.success_is_end))
        return Turn(float(reward), self._shown() != before, bool(terminated), bool(truncated))

    @property
    def succeeded(self) -> bool:
        """Whether the game is won."""
        return self._won

    def render(self) -> str:
        """Return the game's text, with highlighted characters in brackets."""
        return self._shown()

    def close(self) -> None:
        """Close the game."""
        self._env.close()

    def _shown(self) -> str:
        says = self._known.says if self._known else None
        sentence = says(self._env, self._observation) if says else ""
        if self._env.render_mode != "ansi":
            return sentence or str(self._observation)
        picture = self._env.render()
        picture = ESCAPE.sub("", picture if says else HIGHLIGHT.sub(r"[\1]", picture))
        return "\n".join(filter(None, (SAYS_ACTION.sub("", picture).strip("\n"), sentence)))


def _made(game: str, options: Mapping[str, Any]) -> Any:
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        raise EnvironmentFailure(
            f"gymnasium:{game}: the package gymnasium cannot be imported ({error}); install it"
            " (`pip install gymnasium`)"
        ) from error
    try:
        env = gymnasium.make(game, **options)
        if "ansi" in env.metadata.get("render_modes", ()) and "render_mode" not in options:
            env.close()
            env = gymnasium.make(game, render_mode="ansi", **options)
    except Exception as error:  # unknown id, invalid option, or missing package
        raise EnvironmentFailure(f"gymnasium:{game}: {error}; correct the id or env_config") from error
    return env
