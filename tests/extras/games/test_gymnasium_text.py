"""Gymnasium's games, played with the adapter and without it. Skipped if the package is not installed."""

import sys
from typing import Any

import numpy as np
import pytest

from roll_opd.extras.games import EnvironmentFailure, check, find, make


def newest(name: str) -> str:
    """The id of a game in the newest version that is installed."""
    gymnasium = pytest.importorskip("gymnasium", reason="needs gymnasium (pip install gymnasium)")
    versions = [spec.version for spec in gymnasium.registry.values() if spec.name == name]
    return f"{name}-v{max(versions)}"


@pytest.mark.parametrize("name", ["FrozenLake", "Taxi", "CliffWalking", "Blackjack"])
def test_a_game_plays_as_it_does_without_the_adapter(name: str) -> None:
    game = newest(name)
    import gymnasium

    random, ours, theirs = np.random.default_rng(0), make(f"gymnasium:{game}"), gymnasium.make(game)
    actions = ours._known.actions
    for seed in range(20):
        text, info = ours.reset(seed=seed)
        theirs.reset(seed=seed)
        assert text and "\x1b" not in text
        assert info["env_instruction"].endswith(f"Actions: {', '.join(actions)}")
        for turn in range(300):
            number = int(random.integers(len(actions)))
            action = actions[number].upper() if turn % 2 else str(number)
            text, reward, terminated, truncated, info = ours.step(f"<answer>{action}</answer>")
            assert (reward, terminated, truncated) == theirs.step(number)[1:4]
            assert "\x1b" not in text and info["metrics"]["action_is_valid"]
            if terminated or truncated:
                break
    ours.close()


def test_pictures_and_sentences() -> None:
    lake = make(f"gymnasium:{newest('FrozenLake')}", is_slippery=False)
    assert lake.reset(seed=0)[0].split()[0] == "[S]FFF"
    text, *_, info = lake.step("<answer>right</answer>")
    assert text.split()[0] == "S[F]FF" and info["metrics"]["action_is_effective"]
    for action in ("right", "down", "down", "down"):
        *_, terminated, _, info = lake.step(f"<answer>{action}</answer>")
    assert not terminated and not info["metrics"]["success"]
    *_, terminated, _, info = lake.step("<answer>right</answer>")
    assert terminated and info["metrics"]["success"]
    assert "wants to" in make(f"gymnasium:{newest('Taxi')}").reset(seed=0)[0]
    assert "The dealer shows" in make(f"gymnasium:{newest('Blackjack')}").reset(seed=0)[0]


def test_what_is_no_action_is_not_played() -> None:
    cliff = make(f"gymnasium:{newest('CliffWalking')}", format_penalty=-0.5, max_steps=2)
    before, _ = cliff.reset(seed=0)
    for action in ("left of it", "4", "-1"):
        if action != "left of it":
            cliff.reset(seed=0)
        text, reward, *_, info = cliff.step(f"<answer>{action}</answer>")
        assert (text, reward, info["metrics"]["action_is_valid"]) == (before, -0.5, False)
    assert cliff.step("")[2:4] == (False, True)


def test_a_refusal_of_gymnasium_is_reported() -> None:
    game = newest("FrozenLake")
    assert check(f"gymnasium:{game}", {"map_name": "8x8"}) == []
    (problem,) = check("gymnasium:NoSuchGame-v0", {})
    assert "NoSuchGame" in problem
    (problem,) = check(f"gymnasium:{game}", {"is_slipery": True})
    assert "is_slipery" in problem


def test_without_the_package_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(EnvironmentFailure, match="pip install gymnasium"):
        make("gymnasium:Taxi-v3")
    maker: Any = find("gymnasium:Taxi-v3")  # naming it needs nothing
    assert maker.args == ("Taxi-v3",)
