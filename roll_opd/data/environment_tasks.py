"""Tasks of a run in environments: which game begins how. A task is a tag and a seed, and there is no end of them.

Tasks take turns in rounds: a round has as many of each tag as its share says, and every task of the run has a seed of
its own. So the number of tasks that were taken is the whole state.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from roll_opd.base.frozen import FrozenDict, thaw
from roll_opd.config.plan import RunPlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.order import derived_seed
from roll_opd.data.rows import DataError

MOST_SEED = 2**31  # seeds of games are below it
OF_THE_MACHINE = ("step_timeout", "max_env_step_concurrent")  # of an environment's keys: they change no game
RULES = "rules"  # in a state: key of the configuration -> digest of its value
HELD_OUT = 2**20  # in the place of the run's seed, so that validation plays the same games in every run


class EnvironmentSource:
    """An endless stream of tasks that can be resumed anywhere; what `PromptSource` is for rows."""

    def __init__(self, shares: Mapping[str, int], seed: int, rules: Mapping[str, Any] | None = None) -> None:
        """Take what is played.

        Args:
            shares: tag -> tasks of a round, in the order of the round.
            rules: of `rules_of`; where they are given, a state that was saved under others is refused.
        """
        self._shares, self._seed = dict(shares), seed
        self._rules = {key: _digest(value) for key, value in (rules or {}).items()}
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
        state = {"environments": self._shares, "seed": self._seed, "taken": self._taken}
        return {**state, RULES: self._rules} if self._rules else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` exactly; `DataError` where other games, or from other seeds, would be played."""
        own = self.state_dict()
        if state.keys() - {RULES} != own.keys() - {RULES}:
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
        saved = state.get(RULES, self._rules) if self._rules else {}  # an earlier version's state says none
        other = [key for key in {**saved, **self._rules} if saved.get(key) != self._rules.get(key)]
        if other:
            raise DataError(
                f"the run was saved with another {' and another '.join(sorted(other))}, so it would go on with other"
                " games; restore it, or start a new run"
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


def rules_of(plan: RunPlan) -> dict[str, Any]:
    """Return what makes the games that a run learns from what they are, by key of its configuration."""
    assert plan.workflow and plan.rollout
    settings = thaw(plan.workflow.workflow_args["environments"])
    games = {
        f"custom_envs.{tag}": {key: value for key, value in settings[tag].items() if key not in OF_THE_MACHINE}
        for tag in plan.data.environments
    }
    for game in games.values():
        if game["env_type"] == "http":  # where it is served is no part of it
            game["env_config"].pop("url", None)
    return {**games, "train_env_manager.group_size": plan.rollout.sampling.n}


def _digest(value: Any) -> str:
    text = json.dumps(thaw(value), sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def held_out_tasks(shares: Mapping[str, int], count: int) -> list[Prompt]:
    """Return `count` tasks of validation, the same ones in every run."""
    return EnvironmentSource(shares, HELD_OUT).peek(count)
