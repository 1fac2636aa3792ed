"""Tasks of environments: distinct tasks, in the configured fractions, resumed exactly."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.data.row_formats import DataError
from roll_opd.extras.games.task_source import EnvironmentSource, held_out_tasks, rules_of

SHARES = {"lake": 3, "boxes": 1}


def test_tags_have_their_shares_and_no_two_games_begin_alike() -> None:
    tasks = EnvironmentSource(SHARES, 7).take(4000)
    assert Counter(task.tag for task in tasks) == {"lake": 3000, "boxes": 1000}
    assert [task.tag for task in tasks[:4]] == ["lake", "lake", "lake", "boxes"]
    assert len({task.extra["seed"] for task in tasks}) == len({task.id for task in tasks}) == 4000
    assert all(task.extra["tag"] == task.tag and 0 <= task.extra["seed"] < 2**31 for task in tasks)


def test_another_seed_gives_other_games() -> None:
    first, second = (EnvironmentSource(SHARES, seed).peek(50) for seed in (1, 2))
    assert not {task.id for task in first} & {task.id for task in second}


@pytest.mark.parametrize("sizes", [[7, 1, 12], [20], [1] * 20])
def test_peek_returns_the_tasks_of_take_and_a_resumed_source_continues(sizes: list[int]) -> None:
    whole, source, taken = EnvironmentSource(SHARES, 3).take(20), EnvironmentSource(SHARES, 3), []
    for size in sizes:
        assert source.position == len(taken) and source.epochs == len(taken) / 4
        seen = source.peek(size)
        resumed = EnvironmentSource(SHARES, 3)
        resumed.load_state_dict(source.state_dict())
        assert resumed.take(size) == source.take(size) == seen
        taken += seen
    assert taken == whole and [a.extra for a in taken] == [b.extra for b in whole]


def test_validation_plays_the_same_games_whatever_the_runs_seed() -> None:
    assert held_out_tasks(SHARES, 9) == held_out_tasks(SHARES, 9)
    assert not {t.id for t in held_out_tasks(SHARES, 99)} & {t.id for t in EnvironmentSource(SHARES, 42).peek(9999)}


def rules(group: int = 4, **settings: Any) -> dict[str, Any]:
    game = {"env_type": "lake", "env_config": {"size": 4}, "step_timeout": 60.0, **settings}
    workflow = SimpleNamespace(workflow_args=FrozenDict({"environments": {"lake": game, "boxes": game}}))
    rollout = SimpleNamespace(sampling=SimpleNamespace(n=group))
    plan: Any = SimpleNamespace(workflow=workflow, rollout=rollout, data=SimpleNamespace(environments={"lake": 3}))
    return rules_of(plan)


@pytest.mark.parametrize(
    ("now", "key"),
    [
        (rules(env_config={"size": 8}), "custom_envs.lake"),
        (rules(agent_template="{observation}!"), "custom_envs.lake"),
        (rules(group=8), "train_env_manager.group_size"),
    ],
)
def test_a_run_of_changed_games_is_not_resumed(now: dict[str, Any], key: str) -> None:
    state = EnvironmentSource(SHARES, 7, rules()).state_dict()
    with pytest.raises(
        DataError, match=f"saved with a different {key}, so it would continue with other games; restore the setting"
    ):
        EnvironmentSource(SHARES, 7, now).load_state_dict(state)


def test_changed_machine_keys_are_accepted() -> None:
    source = EnvironmentSource(SHARES, 7, rules())
    source.take(5)
    resumed = EnvironmentSource(SHARES, 7, rules(step_timeout=5.0))
    resumed.load_state_dict(source.state_dict())
    assert resumed.position == 5
    served, moved = (rules(env_type="http", env_config={"url": f"http://h:{port}"}) for port in (1, 2))
    EnvironmentSource(SHARES, 7, moved).load_state_dict(EnvironmentSource(SHARES, 7, served).state_dict())


@pytest.mark.parametrize(
    ("other", "word"),
    [(EnvironmentSource({"lake": 4}, 7), "train_env_manager"), (EnvironmentSource(SHARES, 8), "restore seed")],
)
def test_a_run_that_would_play_other_games_is_not_resumed(other: EnvironmentSource, word: str) -> None:
    state = EnvironmentSource(SHARES, 7).state_dict()
    with pytest.raises(DataError, match=word):
        other.load_state_dict(state)
    with pytest.raises(DataError, match="over prompts"):
        other.load_state_dict({"seed": 7, "files": [], "streams": []})
