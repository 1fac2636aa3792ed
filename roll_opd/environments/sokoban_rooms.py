"""Sokoban rooms: random generation backwards from the solved state, moves, and a solver.

A state is (player, boxes); cells are (row, column).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from roll_opd.environments.interface import EnvironmentFailure

Cell = tuple[int, int]
Boxes = tuple[Cell, ...]  # box i was pulled from target i
MOVES = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}
MAX_ROOMS = 1_000  # attempts per seed
PICKY_ROOMS = 30  # first attempts, which must need more than one push
MAX_PULLED = 3_000  # states searched backwards per room
MAX_SOLVED = 300_000  # states searched by `solution`
TURN_CHANCE = 0.35  # of the walk that carves the floor, as in gym-sokoban
STEPS_PER_SIDE = 1.7  # of that walk, times rows and columns, as in gym-sokoban
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
    """Room with its current state."""

    floor: frozenset[Cell]  # all cells but walls, including targets
    targets: frozenset[Cell]
    player: Cell
    boxes: frozenset[Cell]


def draw_room(random: np.random.Generator, rows: int, columns: int, boxes: int, depth: int) -> Room:
    """Return a room with every box off the targets, at most `depth` moves from the solved state.

    Raises `EnvironmentFailure` if none is found.
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
        f"sokoban: no room of {rows} x {columns} with {boxes} boxes found within {depth} moves; raise dim_room"
        " or search_depth, or lower num_boxes"
    )


def pushed(floor: frozenset[Cell], player: Cell, boxes: frozenset[Cell], action: int) -> tuple[Cell, frozenset[Cell]]:
    """Return the state after a move, which may push a box; unchanged if the move is blocked."""
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
    """Return the actions of a shortest solution; None if there is none.

    Raises `EnvironmentFailure` if the room has too many states to search.
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
        if len(came) > MAX_SOLVED:
            raise EnvironmentFailure(
                f"sokoban: the room has more than {MAX_SOLVED} states; solve rooms with fewer boxes or cells"
            )
        for action in MOVES:
            after = pushed(room.floor, *state, action)
            if after not in came:
                came[after] = (action, state)
                waiting.append(after)
    return None


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
    """Return the hardest state found backwards from the solved one; None if none is harder than `above`.

    Difficulty is gym-sokoban's: total distance of boxes from their targets times the number of box swaps.
    """
    best, found = above, None
    seen: set[tuple[Cell, frozenset[Cell]]] = set()
    waiting = [(player, targets, depth, -1, 0)]  # depth first, to get far away
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
    """Yield (player, boxes, number of the pulled box or -1) for each backward move from a state."""
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
