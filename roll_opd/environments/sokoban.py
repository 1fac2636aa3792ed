"""`sokoban`: push all boxes onto the targets. Arguments and symbols are ROLL's, rewards gym-sokoban's
(https://github.com/mpSchrader/gym-sokoban); rooms of a seed differ from ROLL's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll_opd.environments.actions import PATTERN, SPECIAL_TOKENS
from roll_opd.environments.game import Game, Turn, at_least, random_numbers
from roll_opd.environments.grid import complete, explained, numbered, only_text
from roll_opd.environments.interface import ENVIRONMENTS, EnvironmentFailure
from roll_opd.environments.sokoban_rooms import MOVES, Cell, Room, draw_room, pushed, solution

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
class Sokoban(Game):
    """Sokoban: reward -0.1 per turn, 1 for a box pushed onto a target, -1 for one pushed off, 10 when solved."""

    def __init__(
        self,
        render_mode: str = "text",
        dim_room: Sequence[int] = (10, 10),
        max_steps: int = 20,
        num_boxes: int = 4,
        search_depth: int = 300,
        grid_lookup: Mapping[Any, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        action_lookup: Mapping[Any, str] | None = None,
        env_instruction: str | None = None,
        format_penalty: float = 0.0,
        action_pattern: str = PATTERN,
        special_token_list: Sequence[str] | None = SPECIAL_TOKENS,
    ) -> None:
        """`dim_room`: rows and columns including walls; `search_depth`: maximum moves from the solved state."""
        only_text(render_mode)
        if len(dim_room) != 2 or min(dim_room) < 4:
            raise EnvironmentFailure(
                f"dim_room is {list(dim_room)}; set rows and columns of at least 4, such as [6, 6]"
            )
        at_least("num_boxes", num_boxes, 1)
        at_least("search_depth", search_depth, 1)
        self._size, self._boxes, self._depth = (dim_room[0], dim_room[1]), num_boxes, search_depth
        if num_boxes + 1 >= (dim_room[0] - 2) * (dim_room[1] - 2):
            raise EnvironmentFailure(f"num_boxes is {num_boxes}, too many for a room of {list(dim_room)}; lower it")
        self._symbols = complete("grid_lookup", grid_lookup, SYMBOLS)
        actions = ACTIONS if action_lookup is None else numbered("action_lookup", action_lookup, MOVES)
        text = INSTRUCTION if env_instruction is None else env_instruction
        super().__init__(
            instruction=explained(text, grid_vocab or MEANINGS, actions),
            action_lookup=actions,
            max_steps=max_steps,
            format_penalty=format_penalty,
            action_pattern=action_pattern,
            special_token_list=special_token_list,
        )
        self._room: Room | None = None

    @property
    def room(self) -> Room:
        """Current room; raises `EnvironmentFailure` before the first `reset`."""
        if self._room is None:
            raise EnvironmentFailure("sokoban: no episode is active; call reset")
        return self._room

    def begin(self, seed: int | None) -> None:
        """Draw a room."""
        self._room = draw_room(random_numbers(seed), *self._size, self._boxes, self._depth)

    def play(self, action: int) -> Turn:
        """Walk, and push a box in the way."""
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
        rows, columns = self._size
        lines = ([self._symbols[self._number((row, column))] for column in range(columns)] for row in range(rows))
        return "\n".join(map("".join, lines))

    def solve(self) -> list[str]:
        """Return the action names of a shortest solution from the current state.

        Raises `EnvironmentFailure` if there is none, if the room has too many states (see `solution`), or if
        `action_lookup` lacks a direction.
        """
        actions = solution(self.room)
        names = self._names or ACTIONS
        if actions is None or not set(actions) <= names.keys():
            raise EnvironmentFailure("sokoban: the room cannot be solved from here; reset, or undo the last push")
        return [names[action] for action in actions]

    def _number(self, cell: Cell) -> int:
        room = self.room
        on_target = cell in room.targets
        if cell == room.player:
            return PLAYER_ON_TARGET if on_target else PLAYER
        if cell in room.boxes:
            return BOX_ON_TARGET if on_target else BOX
        return TARGET if on_target else EMPTY if cell in room.floor else WALL
