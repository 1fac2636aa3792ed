"""Endless stream of environment tasks for a run. A task is a tag (the game) and a seed (its initial state).

Tags take turns in rounds with a fixed number of tasks of each tag; every task has another seed. So the number of
tasks taken is the complete state.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from roll_opd.base.frozen import FrozenDict, thaw
from roll_opd.config.plan import RunPlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.prompt_source import derived_seed
from roll_opd.data.rows import DataError

SEED_LIMIT = 2**31  # seeds of games are below it
MACHINE_KEYS = ("step_timeout", "max_env_step_concurrent")  # keys of an environment that do not change its games
RULES = "rules"  # in a state: key of the configuration -> digest of its value
VALIDATION_SEED = 2**20  # replaces the run's seed, so that validation plays the same games in every run


class EnvironmentSource:
    """Endless, resumable stream of environment tasks; the counterpart of `PromptSource` for rows."""

    def __init__(self, shares: Mapping[str, int], seed: int, rules: Mapping[str, Any] | None = None) -> None:
        """Make the stream.

        Args:
            shares: tag -> tasks of a round, in the order of the round.
            rules: of `rules_of`; a state saved with other rules is refused. None: not checked.
        """
        self._shares, self._seed = dict(shares), seed
        self._rules = {key: _digest(value) for key, value in (rules or {}).items()}
        self._round = [tag for tag, count in shares.items() for _ in range(count)]
        self._taken = 0

    @property
    def position(self) -> int:
        """Tasks taken since the start of the run."""
        return self._taken

    @property
    def epochs(self) -> float:
        """Rounds since the start of the run."""
        return self._taken / len(self._round)

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` tasks and advance the position."""
        tasks = self.peek(n)
        self.skip(n)
        return tasks

    def peek(self, n: int) -> list[Prompt]:
        """Return the next `n` tasks without advancing the position."""
        return [self._task(number) for number in range(self._taken, self._taken + n)]

    def skip(self, n: int) -> None:
        """Advance the position by `n` tasks."""
        self._taken += n

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types."""
        state = {"environments": self._shares, "seed": self._seed, "taken": self._taken}
        return {**state, RULES: self._rules} if self._rules else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position from `state`; raises `DataError` if games, seed or rules differ from it."""
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
        saved = state.get(RULES, self._rules) if self._rules else {}  # states of earlier versions have no rules
        other = [key for key in {**saved, **self._rules} if saved.get(key) != self._rules.get(key)]
        if other:
            raise DataError(
                f"the run was saved with another {' and another '.join(sorted(other))}, so it would continue with other"
                " games; restore it, or start a new run"
            )
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
    """Return the configuration values that define the training games, by key."""
    assert plan.workflow and plan.rollout
    settings = thaw(plan.workflow.workflow_args["environments"])
    games = {
        f"custom_envs.{tag}": {key: value for key, value in settings[tag].items() if key not in MACHINE_KEYS}
        for tag in plan.data.environments
    }
    for game in games.values():
        if game["env_type"] == "http":  # its address does not change the game
            game["env_config"].pop("url", None)
    return {**games, "train_env_manager.group_size": plan.rollout.sampling.n}


def _digest(value: Any) -> str:
    text = json.dumps(thaw(value), sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def held_out_tasks(shares: Mapping[str, int], count: int) -> list[Prompt]:
    """Return `count` validation tasks, the same in every run."""
    return EnvironmentSource(shares, VALIDATION_SEED).peek(count)
