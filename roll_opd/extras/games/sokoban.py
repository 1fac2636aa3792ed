"""`sokoban`: push all boxes onto the targets.

The arguments and symbols are those of ROLL. The rewards are those of gym-sokoban
(https://github.com/mpSchrader/gym-sokoban). The same seed gives a different room than in ROLL.

A room is generated backwards: starting from the solved state, boxes are pulled off their targets. A state is the pair
(player, boxes), and a cell is the pair (row, column).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

Cell = tuple[int, int]
Boxes = tuple[Cell, ...]  # box i was pulled from target i
MOVES = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}
MAX_ROOMS = 1_000  # attempts per seed
PICKY_ROOMS = 30  # number of first attempts in which a room must need more than one push
MAX_PULLED = 3_000  # maximum number of states in the backward search for a room
TURN_CHANCE = 0.35  # probability that the walk that carves the floor turns, as in gym-sokoban
STEPS_PER_SIDE = 1.7  # steps of that walk as a factor on rows plus columns, as in gym-sokoban
# floor carved around one step of the walk: lines, corners and squares
BRUSHES: tuple[tuple[Cell, ...], ...] = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0), (1, 1)),
)


@dataclass(frozen=True)
class Room:
    """A room with its current state."""

    floor: frozenset[Cell]  # all cells but walls, including targets
    targets: frozenset[Cell]
    player: Cell
    boxes: frozenset[Cell]


def draw_room(random: np.random.Generator, rows: int, columns: int, boxes: int, depth: int) -> Room:
    """Return a room with every box off the targets, at most `depth` moves from the solved state.

    Raises `EnvironmentFailure` if no such room is found.
    """
    for number in range(MAX_ROOMS):
        floor = _carved(random, rows, columns)
        if len(floor) <= boxes + 1:
            continue
        places = [floor[int(place)] for place in random.choice(len(floor), boxes + 1, replace=False)]
        player, targets = places[0], tuple(places[1:])
        pulled = _pulled(random, frozenset(floor), player, targets, depth, 1 if number < PICKY_ROOMS else 0)
        if pulled is not None:
            return Room(frozenset(floor), frozenset(targets), pulled[0], frozenset(pulled[1]))
    raise EnvironmentFailure(
        f"sokoban: no room of {rows} x {columns} with {boxes} boxes was found within {depth} moves; raise dim_room"
        " or search_depth, or lower num_boxes"
    )


def pushed(floor: frozenset[Cell], player: Cell, boxes: frozenset[Cell], action: int) -> tuple[Cell, frozenset[Cell]]:
    """Return the state after a move, which may push a box. A blocked move does not change the state."""
    reached = _neighbour(player, action)
    if reached not in floor:
        return player, boxes
    if reached not in boxes:
        return reached, boxes
    beyond = _neighbour(reached, action)
    if beyond not in floor or beyond in boxes:
        return player, boxes
    return reached, boxes - {reached} | {beyond}


def solution(room: Room) -> list[int] | None:
    """Return the actions of a shortest solution, or None if there is no solution."""
    return shortest_way(
        (room.player, room.boxes),
        MOVES,
        lambda state, action: pushed(room.floor, *state, action),
        lambda state: state[1] == room.targets,
    )


def _carved(random: np.random.Generator, rows: int, columns: int) -> list[Cell]:
    """Return the sorted cells carved by a random walk inside the outer walls."""
    row, column = int(random.integers(1, rows - 1)), int(random.integers(1, columns - 1))
    direction = MOVES[1 + int(random.integers(4))]
    floor = set()
    for _ in range(int(STEPS_PER_SIDE * (rows + columns))):
        if random.random() < TURN_CHANCE:
            direction = MOVES[1 + int(random.integers(4))]
        row = min(max(row + direction[0], 1), rows - 2)
        column = min(max(column + direction[1], 1), columns - 2)
        for down, right in BRUSHES[int(random.integers(len(BRUSHES)))]:
            floor.add((row + down, column + right))
    return sorted((r, c) for r, c in floor if 0 < r < rows - 1 and 0 < c < columns - 1)


def _pulled(
    random: np.random.Generator, floor: frozenset[Cell], player: Cell, targets: Boxes, depth: int, above: int
) -> tuple[Cell, Boxes] | None:
    """Search backwards from the solved state, and return the hardest state that was found.

    Returns None if no state is harder than `above`. The difficulty is defined as in gym-sokoban: the total distance of
    the boxes from their targets, multiplied by the number of box swaps.
    """
    best, found = above, None
    seen: set[tuple[Cell, frozenset[Cell]]] = set()
    waiting = [(player, targets, depth, -1, 0)]  # depth first, to get far from the solved state
    while waiting and len(seen) < MAX_PULLED:
        player, boxes, left, last, swaps = waiting.pop()
        state = (player, frozenset(boxes))
        if state in seen:
            continue
        seen.add(state)
        score = swaps * _displaced(boxes, targets)
        if score > best and not set(boxes) & set(targets):
            best, found = score, (player, boxes)
        if left:
            following = list(_backwards(floor, player, boxes))
            for number in random.permutation(len(following)):
                reached, moved, box = following[int(number)]
                waiting.append((reached, moved, left - 1, last if box < 0 else box, swaps + (box not in (-1, last))))
    return found


def _backwards(floor: frozenset[Cell], player: Cell, boxes: Boxes) -> Iterator[tuple[Cell, Boxes, int]]:
    """Yield (player, boxes, pulled) for each backward move from a state.

    `pulled` is the number of the box that the move pulls, or -1 if it pulls no box.
    """
    for action, (down, right) in MOVES.items():
        reached = _neighbour(player, action)
        if reached not in floor or reached in boxes:
            continue
        beyond = (player[0] - down, player[1] - right)
        box = boxes.index(beyond) if beyond in boxes else -1
        yield reached, tuple(player if number == box else cell for number, cell in enumerate(boxes)), box


def _displaced(boxes: Boxes, targets: Boxes) -> int:
    pairs = zip(boxes, targets, strict=True)
    return sum(abs(box[0] - target[0]) + abs(box[1] - target[1]) for box, target in pairs)


def _neighbour(cell: Cell, action: int) -> Cell:
    down, right = MOVES[action]
    return cell[0] + down, cell[1] + right


STEP, ON_TARGET, OFF_TARGET, FINISHED = -0.1, 1.0, -1.0, 10.0
ACTIONS = {1: "Up", 2: "Down", 3: "Left", 4: "Right"}
WALL, EMPTY, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
SYMBOLS = {0: "#", 1: "_", 2: "O", 3: "√", 4: "X", 5: "P", 6: "S"}
MEANINGS = {
    "#": "wall",
    "_": "empty",
    "O": "target",
    "√": "box on a target",
    "X": "box",
    "P": "player",
    "S": "player on a target",
}
INSTRUCTION = (
    "You are playing Sokoban. Push every box onto a target. Where you walk against a box you push it on, if the cell"
    " behind it is free; boxes cannot be pulled. Give one action a turn, in this form: <answer>Right</answer>"
)


@ENVIRONMENTS.register("sokoban")
@dataclass(eq=False)
class Sokoban(Game):
    """Sokoban.

    The rewards are -0.1 for each turn, 1 for pushing a box onto a target, -1 for pushing a box off a target, and 10 for
    solving the room.

    - `dim_room`: rows and columns, including the walls.
    - `search_depth`: maximum number of moves from the solved state.
    """

    render_mode: str = "text"
    dim_room: Sequence[int] = (10, 10)
    max_steps: int = 20
    num_boxes: int = 4
    search_depth: int = 300
    grid_lookup: Mapping[Any, str] | None = None
    grid_vocab: Mapping[str, str] | None = None
    action_lookup: Mapping[Any, str] | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        only_text(self.render_mode)
        size = list(self.dim_room)
        if len(size) != 2 or min(size) < 4:
            raise EnvironmentFailure(f"dim_room is {size}; set rows and columns of at least 4, such as [6, 6]")
        at_least("num_boxes", self.num_boxes, 1)
        at_least("search_depth", self.search_depth, 1)
        if self.num_boxes + 1 >= (size[0] - 2) * (size[1] - 2):
            raise EnvironmentFailure(f"num_boxes is {self.num_boxes}, too many for a room of {size}; lower num_boxes")
        self._symbols = complete("grid_lookup", self.grid_lookup, SYMBOLS)
        actions = ACTIONS if self.action_lookup is None else numbered("action_lookup", self.action_lookup, MOVES)
        self.set_up(INSTRUCTION, actions, self.grid_vocab or MEANINGS)
        self._room: Room | None = None

    @property
    def room(self) -> Room:
        """The current room. Reading it before the first `reset` raises `EnvironmentFailure`."""
        if self._room is None:
            raise EnvironmentFailure("sokoban: no episode is active; call reset")
        return self._room

    def begin(self, seed: int | None) -> None:
        """Draw a room."""
        rows, columns = self.dim_room
        self._room = draw_room(random_numbers(seed), rows, columns, self.num_boxes, self.search_depth)

    def play(self, action: int) -> Turn:
        """Move the player by one cell, and push a box if it is in that cell."""
        room = self.room
        player, boxes = pushed(room.floor, room.player, room.boxes, action)
        self._room = replace(room, player=player, boxes=boxes)
        gained = len(boxes & room.targets) - len(room.boxes & room.targets)
        reward = STEP + (ON_TARGET if gained > 0 else OFF_TARGET if gained < 0 else 0.0)
        return Turn(reward + FINISHED * self.succeeded, player != room.player, self.succeeded)

    def idle(self) -> Turn:
        """Charge the cost of a turn without moving."""
        return Turn(STEP)

    @property
    def succeeded(self) -> bool:
        """Whether all boxes are on targets."""
        return self.room.boxes == self.room.targets

    def render(self) -> str:
        """Return the room as lines of symbols."""
        rows, columns = self.dim_room
        lines = ([self._symbols[self._number((row, column))] for column in range(columns)] for row in range(rows))
        return "\n".join(map("".join, lines))

    def solve(self) -> list[str]:
        """Return the action names of a shortest solution from the current state.

        Raises `EnvironmentFailure` if there is no solution, if the room has too many states (see `shortest_way`), or if
        `action_lookup` lacks a direction that the solution needs.
        """
        actions = solution(self.room)
        names = self._names or ACTIONS
        if actions is None or not set(actions) <= names.keys():
            raise EnvironmentFailure(
                "sokoban: the room cannot be solved from its current state with these actions; call reset"
            )
        return [names[action] for action in actions]

    def _number(self, cell: Cell) -> int:
        room = self.room
        on_target = cell in room.targets
        if cell == room.player:
            return PLAYER_ON_TARGET if on_target else PLAYER
        if cell in room.boxes:
            return BOX_ON_TARGET if on_target else BOX
        return TARGET if on_target else EMPTY if cell in room.floor else WALL
