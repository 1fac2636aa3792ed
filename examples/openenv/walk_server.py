"""A game of OpenEnv: walk over a board of 4 x 4 to the goal. The reward is 1 there."""

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

MOVES = {"Left": (0, -1), "Right": (0, 1), "Up": (-1, 0), "Down": (1, 0)}


class Move(Action):
    text: str


class Board(Observation):
    text: str


class Walk(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Board:
        start, goal = random.Random(seed).sample(range(16), 2)
        self.place, self.goal = divmod(start, 4), divmod(goal, 4)
        return self.seen()

    def step(self, action: Move, timeout_s: float | None = None, **others: Any) -> Board:
        down, right = MOVES.get(action.text.strip(), (0, 0))
        self.place = min(max(self.place[0] + down, 0), 3), min(max(self.place[1] + right, 0), 3)
        return self.seen()

    def seen(self) -> Board:
        cells = [["_"] * 4 for _ in range(4)]
        for (row, column), sign in ((self.goal, "G"), (self.place, "P")):
            cells[row][column] = sign
        there = self.place == self.goal
        return Board(text="\n".join(map("".join, cells)), done=there, reward=float(there))


app = create_fastapi_app(Walk, Move, Board, max_concurrent_envs=256)
