"""`frozen_lake`: walk over ice to the goal, and avoid the holes.

For the same seed, the maps, slips, symbols and rewards equal those of ROLL's `frozen_lake`. That game is gymnasium's
FrozenLake with a random start and goal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_opd.extras.games.environment_interface import ENVIRONMENTS, EnvironmentFailure
from roll_opd.extras.games.game import (
    Game,
    Turn,
    at_least,
    complete,
    numbered,
    only_text,
    random_numbers,
    shortest_way,
)

Cell = tuple[int, int]  # row, column
MOVES = {0: (0, -1), 1: (1, 0), 2: (0, 1), 3: (-1, 0)}  # slipping moves to a neighbour in this order
ACTIONS = {0: "Left", 1: "Down", 2: "Right", 3: "Up"}
SYMBOLS = {0: "P", 1: "_", 2: "O", 3: "G", 4: "X", 5: "√"}
MEANINGS = {"P": "player", "_": "empty", "O": "hole", "G": "goal", "X": "player in a hole", "√": "player on the goal"}
CELLS = {"P": 0, "F": 1, "H": 2, "G": 3}  # letters of a map -> numbers of symbols
IN_HOLE, ON_GOAL = 4, 5
MAX_MAPS = 10_000  # attempts per seed
INSTRUCTION = (
    "You are walking over a frozen lake. Reach the goal, and do not fall into a hole.{slips} Give one action a turn, in"
    " this form: <answer>Right</answer>"
)
SLIPS = " The ice is slippery: you may move to the side of where you want to go."


@ENVIRONMENTS.register("frozen_lake")
@dataclass(eq=False)
class FrozenLake(Game):
    """Frozen lake. The reward is 1 at the goal, else 0. A hole ends the game.

    A valid action counts as a turn even if the player does not move.

    - `p`: probability that a cell is ice.
    - `map_seed`: if it is set, all episodes use the map of this seed. The seed of an episode then determines only the
      slips.
    """

    size: int = 4
    p: float = 0.8
    is_slippery: bool = True
    map_seed: int | None = None
    max_steps: int = 20
    grid_lookup: Mapping[Any, str] | None = None
    grid_vocab: Mapping[str, str] | None = None
    map_lookup: Mapping[Any, int] | None = None
    action_lookup: Mapping[Any, str] | None = None
    render_mode: str = "text"

    def __post_init__(self) -> None:
        """Check the arguments."""
        only_text(self.render_mode)
        at_least("size", self.size, 2)
        if not 0 < self.p <= 1:
            raise EnvironmentFailure(f"p is {self.p}; set the fraction of ice cells, above 0 and at most 1")
        self._symbols = complete("grid_lookup", self.grid_lookup, SYMBOLS)
        self._cells = _cells(self.map_lookup)
        actions = ACTIONS if self.action_lookup is None else numbered("action_lookup", self.action_lookup, MOVES)
        instruction = INSTRUCTION.format(slips=SLIPS if self.is_slippery else "")
        self.set_up(instruction, actions, self.grid_vocab or MEANINGS)
        self._ice, self._player, self._goal = np.ones((self.size, self.size), bool), (0, 0), (self.size - 1,) * 2

    def begin(self, seed: int | None) -> None:
        """Draw a solvable map."""
        map_seed = seed if self.map_seed is None else self.map_seed
        self._ice, self._player, self._goal = draw_map(random_numbers(map_seed), self.size, self.p)
        self._random = random_numbers(seed)
        self._random.random()  # gymnasium draws a number for the start, although only one cell is possible

    def play(self, action: int) -> Turn:
        """Move, or slip to one of the two perpendicular directions."""
        if self.is_slippery:
            shares = np.cumsum([1 / 3, 1 / 3, 1 / 3])
            action = (action + int(np.argmax(shares > self._random.random())) - 1) % len(MOVES)
        before, self._player = self._player, _moved(self._player, action, self.size)
        over = self.succeeded or not self._ice[self._player]
        return Turn(float(self.succeeded), self._player != before, over)

    @property
    def succeeded(self) -> bool:
        """Whether the player is on the goal."""
        return self._player == self._goal

    def render(self) -> str:
        """Return the map as lines of symbols."""
        numbers = np.where(self._ice, self._cells["F"], self._cells["H"])
        numbers[self._goal] = self._cells["G"]
        fallen = not self._ice[self._player]
        numbers[self._player] = ON_GOAL if self.succeeded else IN_HOLE if fallen else self._cells["P"]
        return "\n".join("".join(self._symbols[int(number)] for number in row) for row in numbers)

    def solve(self) -> list[str]:
        """Return the action names of a shortest path to the goal, without slips.

        Raises `EnvironmentFailure` if there is no path: the player is in a hole, or `action_lookup` lacks a direction.
        """
        way = way_over(self._ice, self._player, self._goal, self._names or MOVES)
        if way is None:
            raise EnvironmentFailure("frozen_lake: no path to the goal; reset")
        return [(self._names or ACTIONS)[action] for action in way]


def draw_map(random: np.random.Generator, size: int, p: float) -> tuple[np.ndarray, Cell, Cell]:
    """Return (ice, start, goal) of the first solvable map. `ice` is bool [size, size]."""
    for _ in range(MAX_MAPS):
        ice = random.choice(2, (size, size), p=[p, 1 - p]) == 0
        start, goal = ((int(row), int(column)) for row, column in (random.integers(size, size=2) for _ in range(2)))
        if start == goal:
            continue
        ice[start] = ice[goal] = True
        if way_over(ice, start, goal, MOVES) is not None:
            return ice, start, goal
    raise EnvironmentFailure(f"frozen_lake: no solvable map of size {size} with p {p} found; raise p")


def way_over(ice: np.ndarray, start: Cell, goal: Cell, actions: Iterable[int]) -> list[int] | None:
    """Return the actions of a shortest way over the ice, or None if there is no way."""

    def after(cell: Cell, action: int) -> Cell:
        reached = _moved(cell, action, len(ice))
        return reached if ice[reached] else cell

    return shortest_way(start, actions, after, lambda cell: cell == goal) if ice[start] else None


def _moved(cell: Cell, action: int, size: int) -> Cell:
    down, right = MOVES[action]
    return min(max(cell[0] + down, 0), size - 1), min(max(cell[1] + right, 0), size - 1)


def _cells(map_lookup: Mapping[Any, int] | None) -> dict[str, int]:
    """Return a dict: letter of a map -> number of its symbol. ROLL writes the letters as bytes."""
    own = {(key.decode() if isinstance(key, bytes) else str(key)): value for key, value in (map_lookup or {}).items()}
    if not own.keys() <= CELLS.keys() or not set(own.values()) <= SYMBOLS.keys():
        raise EnvironmentFailure(
            f"map_lookup is {own}; map each of these letters to a number of grid_lookup: {', '.join(CELLS)}"
        )
    return {**CELLS, **own}
