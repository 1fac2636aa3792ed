"""Tasks of environments: every one of its own, in the shares that are asked for, and resumed exactly."""

from collections import Counter

import pytest

from roll_opd.data.environments import EnvironmentSource, held_out_tasks
from roll_opd.data.rows import DataError

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
def test_what_was_looked_at_is_what_comes_and_a_resumed_source_goes_on(sizes: list[int]) -> None:
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
