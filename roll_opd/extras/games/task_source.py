"""The endless stream of environment tasks of a run, which can be resumed at any position.

An environment task is a tag (the game) and a seed (its initial state). The tags take turns. In each round, every tag
has a fixed number of tasks. Every task has a different seed. The number of a task determines its tag and its seed, so
the number of taken tasks is the complete state.
"""

import json
from collections.abc import Mapping
from copy import copy
from hashlib import blake2b
from typing import Any

import numpy as np

from roll_opd.base.frozen import FrozenDict, thaw
from roll_opd.config.plan import RunPlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.prompt_source import PASSED, derived_seed
from roll_opd.data.row_formats import DataError

SEED_LIMIT = 2**31  # seeds of games are smaller
MACHINE_KEYS = ("step_timeout", "max_env_step_concurrent")  # keys of an environment that do not change the games
RULES = "rules"  # key of a state: key of the configuration -> digest of its value
VALIDATION_SEED = 2**20  # replaces the run's seed, so that validation plays the same games in every run


class EnvironmentSource:
    """An endless stream of environment tasks that can be resumed.

    `PromptSource` is the corresponding stream of rows.
    """

    def __init__(self, shares: Mapping[str, int], seed: int, rules: Mapping[str, Any] = FrozenDict()) -> None:
        """Create the stream.

        Args:
            shares: tag -> number of tasks per round. The tags are played in this order.
            seed: seed of the tasks.
            rules: result of `rules_of`. A state with other rules is refused.
        """
        self.passed: frozenset[int] = frozenset()  # draws after the position; a resumed run skips them
        self._shares, self._seed = dict(shares), seed
        self._rules = {key: _digest(value) for key, value in rules.items()}
        self._round = [tag for tag, count in shares.items() for _ in range(count)]
        self._taken = 0

    @property
    def position(self) -> int:
        """Number of tasks taken since the start of the run."""
        return self._taken

    @property
    def epochs(self) -> float:
        """Number of rounds since the start of the run. It may be a fraction."""
        return self._taken / len(self._round)

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` tasks, and advance the position."""
        tasks = self.peek(n)
        self.skip(n)
        return tasks

    def peek(self, n: int) -> list[Prompt]:
        """Return the next `n` tasks without advancing the position."""
        return [self._task(number) for number in range(self._taken, self._taken + n)]

    def skip(self, n: int) -> None:
        """Advance the position by `n` tasks."""
        self._taken += n

    def copy(self) -> "EnvironmentSource":
        """Return a source at the same position, which advances independently."""
        return copy(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types."""
        return {"environments": self._shares, "seed": self._seed, "taken": self._taken, RULES: self._rules}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position from a state. Raises `DataError` if the games, the seed or the rules have changed."""
        own = self.state_dict()
        if state.keys() - {PASSED} != own.keys():
            raise DataError(
                "the saved position in the data is that of a run over prompts, but this run plays environments; resume"
                " with the configuration of the saved run, or start a new run"
            )
        for name, key in (("environments", "train_env_manager"), ("seed", "seed")):
            if state[name] != own[name]:
                raise DataError(
                    f"the run was saved with {name} {state[name]} and is resumed with {own[name]}, which changes the"
                    f" games; restore {key}, or start a new run"
                )
        saved = state[RULES]
        other = [key for key in {**saved, **self._rules} if saved.get(key) != self._rules.get(key)]
        if other:
            raise DataError(
                f"the run was saved with a different {' and a different '.join(sorted(other))}, so it would continue"
                " with other games; restore the setting, or start a new run"
            )
        self.passed = frozenset(state.get(PASSED, ()))
        self._taken = int(state["taken"])

    def _task(self, number: int) -> Prompt:
        tag = self._round[number % len(self._round)]
        seed = derived_seed(self._seed, number) % SEED_LIMIT
        return Prompt(
            id=f"{tag}/{seed}",
            index=number,
            tag=tag,
            tokens=np.zeros(0, np.int64),
            extra=FrozenDict({"tag": tag, "seed": seed}),
        )


def rules_of(plan: RunPlan) -> dict[str, Any]:
    """Return the settings that define the training games, as a map from configuration keys to values."""
    assert plan.workflow and plan.rollout
    settings = thaw(plan.workflow.workflow_args["environments"])
    games = {
        f"custom_envs.{tag}": {key: value for key, value in settings[tag].items() if key not in MACHINE_KEYS}
        for tag in plan.data.environments
    }
    for game in games.values():
        if game["env_type"] == "http":  # the address of an environment's server does not change the game
            game["env_config"].pop("url", None)
    return {**games, "train_env_manager.group_size": plan.rollout.sampling.n}


def _digest(value: Any) -> str:
    text = json.dumps(thaw(value), sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def held_out_tasks(shares: Mapping[str, int], count: int) -> list[Prompt]:
    """Return `count` validation tasks. They are the same in every run."""
    return EnvironmentSource(shares, VALIDATION_SEED).peek(count)
