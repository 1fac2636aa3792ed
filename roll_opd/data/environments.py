"""Tasks of a run in environments: which game begins how. A task is a tag and a seed, and there is no end of them.

Tasks take turns in rounds: a round has as many of each tag as its share says, and every task of the run has a seed of
its own. So the number of tasks that were taken is the whole state.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from roll_opd.data.order import derived_seed
from roll_opd.data.prompts import Prompt
from roll_opd.data.rows import DataError
from roll_opd.frozen import FrozenDict

MOST_SEED = 2**31  # seeds of games are below it
HELD_OUT = 2**20  # in the place of the run's seed, so that validation plays the same games in every run


class EnvironmentSource:
    """An endless stream of tasks that can be resumed anywhere; what `PromptSource` is for rows."""

    def __init__(self, shares: Mapping[str, int], seed: int) -> None:
        """`shares`: tag -> tasks of a round, in the order of the round."""
        self._shares, self._seed = dict(shares), seed
        self._round = [tag for tag, count in shares.items() for _ in range(count)]
        self._taken = 0

    @property
    def position(self) -> int:
        """Tasks taken since the run began."""
        return self._taken

    @property
    def epochs(self) -> float:
        """Rounds since the run began."""
        return self._taken / len(self._round)

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` tasks, and count them as taken."""
        tasks = self.peek(n)
        self.skip(n)
        return tasks

    def peek(self, n: int) -> list[Prompt]:
        """Return the next `n` tasks."""
        return [self._task(number) for number in range(self._taken, self._taken + n)]

    def skip(self, n: int) -> None:
        """Count the next `n` tasks as taken."""
        self._taken += n

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types."""
        return {"environments": self._shares, "seed": self._seed, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` exactly; `DataError` where other games, or from other seeds, would be played."""
        own = self.state_dict()
        if state.keys() != own.keys():
            raise DataError(
                "the position in the data was saved by a run over prompts, not in environments; resume that run, or"
                " start a new one"
            )
        for name, key in (("environments", "train_env_manager"), ("seed", "seed")):
            if state[name] != own[name]:
                raise DataError(
                    f"the run was saved with {name} {state[name]} and is resumed with {own[name]}, which gives other"
                    f" games; restore {key}, or start a new run"
                )
        self._taken = int(state["taken"])

    def _task(self, number: int) -> Prompt:
        tag = self._round[number % len(self._round)]
        seed = derived_seed(self._seed, number) % MOST_SEED
        return Prompt(
            id=f"{tag}/{seed}",
            index=number,
            tag=tag,
            tokens=np.zeros(0, np.int64),
            extra=FrozenDict({"tag": tag, "seed": seed}),
        )


def held_out_tasks(shares: Mapping[str, int], count: int) -> list[Prompt]:
    """Return `count` tasks of validation, the same ones in every run."""
    return EnvironmentSource(shares, HELD_OUT).peek(count)
