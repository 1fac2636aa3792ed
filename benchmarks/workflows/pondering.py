"""A slow game."""

import random
import time
from typing import Any

from roll_opd.extras.games import ENVIRONMENTS
from roll_opd.extras.games.frozen_lake import FrozenLake


@ENVIRONMENTS.register("pondering")
class Pondering(FrozenLake):
    """FrozenLake in which each step takes up to `think` seconds."""

    def __init__(self, think: float = 0.2, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._think = think

    def step(self, action: str) -> Any:
        """Wait, then step."""
        time.sleep(random.random() * self._think)
        return super().step(action)
