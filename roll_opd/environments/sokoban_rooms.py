"""Rooms of Sokoban: drawn, and then played backwards from the solved state, so that each can be solved.

A state is (player, boxes); cells are (row, column).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from roll_opd.environments.interface import EnvironmentFailure

Cell = tuple[int, int]
Boxes = tuple[Cell, ...]  # the first was pulled from the first target, and so on
MOVES = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}
MOST_ROOMS = 1_000  # drawn for one seed
PICKY_ROOMS = 30  # of which so many are refused where one push solves them
MOST_PULLED = 3_000  # states of one room that are looked at backwards
MOST_SOLVED = 300_000  # states of one room that `solution` looks at
TURN_CHANCE = 0.35  # of the walk that carves the floor, as in gym-sokoban
STEPS_PER_SIDE = 1.7  # of that walk, times rows and columns, as in gym-sokoban
# floor that one step of the walk carves around it: lines, corners and squares
BRUSHES: tuple[tuple[Cell, ...], ...] = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0), (1, 1)),
)


@dataclass(frozen=True)
class Room:
    """A room and how it begins."""

    floor: frozenset[Cell]  # all that is no wall, targets too
    targets: frozenset[Cell]
    player: Cell
    boxes: frozenset[Cell]


def draw_room(random: np.random.Generator, rows: int, columns: int, boxes: int, depth: int) -> Room:
    """Return a room in which every box stands off the targets, at most `depth` moves from the solved state.

    `EnvironmentFailure` where no such room comes up.
    """
    for number in range(MOST_ROOMS):
        floor = _carved(random, rows, columns)
        if len(floor) <= boxes + 1:
            continue
        places = [floor[int(place)] for place in random.choice(len(floor), boxes + 1, replace=False)]
        player, targets = places[0], tuple(places[1:])
        pulled = _pulled(random, frozenset(floor), player, targets, depth, 1 if number < PICKY_ROOMS else 0)
        if pulled is not None:
            return Room(frozenset(floor), frozenset(targets), pulled[0], frozenset(pulled[1]))
    raise EnvironmentFailure(
        f"sokoban: no room of {rows} x {columns} with {boxes} boxes could be made within {depth} moves; raise dim_room"
        " or search_depth, or lower num_boxes"
    )


def pushed(floor: frozenset[Cell], player: Cell, boxes: frozenset[Cell], action: int) -> tuple[Cell, frozenset[Cell]]:
    """Return the state after a move, which pushes a box that stands in the way; the same where it cannot be made."""
    reached = _beside(player, action)
    if reached not in floor:
        return player, boxes
    if reached not in boxes:
        return reached, boxes
    behind = _beside(reached, action)
    if behind not in floor or behind in boxes:
        return player, boxes
    return reached, boxes - {reached} | {behind}


def solution(room: Room) -> list[int] | None:
    """Return the actions of a shortest solution, None where there is none.

    `EnvironmentFailure` where the room has too many states to tell.
    """
    start = (room.player, room.boxes)
    came: dict[tuple[Cell, frozenset[Cell]], tuple[int, tuple[Cell, frozenset[Cell]]] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        if state[1] == room.targets:
            actions = []
            while step := came[state]:
                actions.append(step[0])
                state = step[1]
            return actions[::-1]
        if len(came) > MOST_SOLVED:
            raise EnvironmentFailure(
                f"sokoban: the room has more than {MOST_SOLVED} states; solve rooms with fewer boxes or cells"
            )
        for action in MOVES:
            after = pushed(room.floor, *state, action)
            if after not in came:
                came[after] = (action, state)
                waiting.append(after)
    return None


def _carved(random: np.random.Generator, rows: int, columns: int) -> list[Cell]:
    """Return the cells along a random walk, sorted; the walls around the room stay."""
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
    """Return the hardest state of those found backwards from the solved one; None where none is harder than `above`.

    How hard is, as in gym-sokoban, how far boxes are from their targets times how often another box was pulled.
    """
    best, found = above, None
    seen: set[tuple[Cell, frozenset[Cell]]] = set()
    waiting = [(player, targets, depth, -1, 0)]  # the last found first: it leads far away
    while waiting and len(seen) < MOST_PULLED:
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
    """Yield (player, boxes, number of the box that came along or -1) of the moves backwards from a state."""
    for action, (down, right) in MOVES.items():
        reached = _beside(player, action)
        if reached not in floor or reached in boxes:
            continue
        behind = (player[0] - down, player[1] - right)
        box = boxes.index(behind) if behind in boxes else -1
        yield reached, tuple(player if number == box else cell for number, cell in enumerate(boxes)), box


def _displaced(boxes: Boxes, targets: Boxes) -> int:
    pairs = zip(boxes, targets, strict=True)
    return sum(abs(box[0] - target[0]) + abs(box[1] - target[1]) for box, target in pairs)


def _beside(cell: Cell, action: int) -> Cell:
    down, right = MOVES[action]
    return cell[0] + down, cell[1] + right
