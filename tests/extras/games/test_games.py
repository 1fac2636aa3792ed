"""The built-in games: solvable, equal for equal seeds in any process, solved by their solutions, rewards."""

import hashlib
import os
import subprocess
import sys
from collections import deque
from typing import Any

import numpy as np
import pytest

from roll_opd.extras.games import EnvironmentFailure, make
from tests.cover import repeats

SMALL_ROOM = {"dim_room": [6, 6], "num_boxes": 1, "max_steps": 100}
GAMES: dict[str, dict[str, Any]] = {
    "frozen_lake": {"is_slippery": False},
    "sokoban": SMALL_ROOM,
    "guess_number": {},
    "number_sum": {},
    "search_shop": {"max_steps": 50},
}
MAPS = {
    0: ["__GP", "OO__", "_OO_", "O___"],
    42: ["__P_", "_O__", "___O", "GO__"],
    1: ["_OOO__", "O_O_O_", "______", "_____O", "__O_O_", "_PO_G_"],
}
BEST = {"frozen_lake": 1.0, "guess_number": 1.0, "number_sum": 1.0, "search_shop": 1.0}


def said(action: str) -> str:
    return f"<answer>{action}</answer>"


def played(env: Any, actions: list[str]) -> list[Any]:
    return [env.step(said(action)) for action in actions]


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("seeds", repeats(250, 1000))
def test_each_seed_is_solved_by_its_solution(name: str, seeds: int) -> None:
    env = make(name, **GAMES[name])
    for seed in range(seeds):
        observation, info = env.reset(seed=seed)
        assert isinstance(observation, str) and info["env_instruction"]
        solution = env.solve()
        *before, last = played(env, solution)
        assert not any(terminated or truncated for _, _, terminated, truncated, _ in before)
        assert (last[2], last[3], last[4]["metrics"]["success"]) == (True, False, True), (seed, observation, solution)
        total = sum(step[1] for step in (*before, last))
        assert total == pytest.approx(BEST.get(name, 11 - 0.1 * len(solution)))


def seen(name: str, config: dict[str, Any]) -> str:
    """Return a digest of the observations of 30 seeds, at the start and after a solution."""
    env, texts = make(name, **config), []
    for seed in range(30):
        texts += [*env.reset(seed=seed)[0], *(str(step) for step in played(env, env.solve()))]
    return hashlib.sha256("\n".join(texts).encode("utf-8")).hexdigest()


@pytest.mark.parametrize("name", GAMES)
def test_a_seed_is_the_same_episode_in_any_process(name: str) -> None:
    code = f"from test_games import GAMES, seen; print(seen({name!r}, GAMES[{name!r}]))"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.strip() == seen(name, GAMES[name]), done.stderr


@pytest.mark.parametrize("name", GAMES)
def test_no_global_random_state_is_read_or_changed(name: str) -> None:
    env = make(name, **GAMES[name])
    np.random.seed(1)
    first = env.reset(seed=5)
    np.random.seed(2)
    before = np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    assert env.reset(seed=5) == first
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index,union-attr]
    assert len({env.reset(seed=seed)[0] + str(env.solve()) for seed in range(20)}) > 10
    assert len({env.reset()[0] + str(env.solve()) for _ in range(20)}) > 5


@pytest.mark.parametrize("name", GAMES)
def test_an_episode_has_a_beginning_and_an_end(name: str) -> None:
    env = make(name, **GAMES[name])
    with pytest.raises(EnvironmentFailure, match="call reset"):
        env.step(said("Up"))
    env.reset(seed=0)
    played(env, env.solve())
    with pytest.raises(EnvironmentFailure, match="call reset"):
        env.step(said("Up"))
    for seed in (-1, "3", 1.5):
        with pytest.raises(EnvironmentFailure, match="seed is"):
            env.reset(seed=seed)
    env.reset(seed=np.int64(3))
    env.close()


# --- frozen lake


def test_rolls_maps_for_the_same_seed() -> None:
    """Maps of ROLL's `generate_random_map`, copied from its output."""
    lake = make("frozen_lake")
    assert lake.reset(seed=0)[0].split() == MAPS[0]
    assert lake.reset(seed=42)[0].split() == MAPS[42]
    assert make("frozen_lake", size=6, p=0.7).reset(seed=1)[0].split() == MAPS[1]


def test_symbols_of_ones_own_and_the_last_states() -> None:
    lake = make("frozen_lake", is_slippery=False, grid_lookup={"0": "@", 4: "!", 5: "*"}, map_lookup={b"H": 1})
    lake.reset(seed=42)
    assert "@" in lake.render() and "O" not in lake.render()
    assert "*" in played(lake, lake.solve())[-1][0]
    plain = make("frozen_lake", is_slippery=False)
    for seed in range(100):  # until one falls
        plain.reset(seed=seed)
        observation, reward, terminated, _, info = plain.step(said("left"))
        if terminated and not info["metrics"]["success"]:
            assert "X" in observation and reward == 0 and "P" not in observation
            with pytest.raises(EnvironmentFailure, match="no path to the goal"):
                plain.solve()
            return
    raise AssertionError("nobody fell")


def test_a_wall_is_no_effect_and_the_limit_truncates() -> None:
    lake = make("frozen_lake", is_slippery=False, p=1.0, max_steps=9)
    lake.reset(seed=0)
    *_, last = played(lake, ["Up"] * 3)
    assert last[4]["metrics"]["action_is_effective"] is False and "changed nothing" in last[4]["action_desc"]
    ends = [step[2:4] for step in played(lake, ["Up"] * 6)]
    assert ends == [(False, False)] * 5 + [(False, True)]


def test_slips_go_to_each_side_a_third_of_the_time() -> None:
    lake = make("frozen_lake", size=9, p=1.0, max_steps=10**6)
    counts: dict[Any, int] = {}
    for seed in range(3000):
        start = where(lake.reset(seed=seed)[0])
        if 0 < start[0] < 8 and 0 < start[1] < 8:
            here = where(lake.step(said("Down"))[0])
            move = (here[0] - start[0], here[1] - start[1])
            counts[move] = counts.get(move, 0) + 1
    assert counts.keys() == {(1, 0), (0, 1), (0, -1)}
    assert all(abs(count / sum(counts.values()) - 1 / 3) < 0.04 for count in counts.values())


def test_one_map_in_every_episode() -> None:
    lake = make("frozen_lake", map_seed=42)
    assert {lake.reset(seed=seed)[0] for seed in range(5)} == {make("frozen_lake").reset(seed=42)[0]}


def where(observation: str) -> tuple[int, int]:
    rows = observation.split("\n")
    return next((row, line.index(mark)) for row, line in enumerate(rows) for mark in "P√" if mark in line)


def distance(observation: str) -> int:
    """Return the distance of the player from the goal, by a search over the map; a reference for `solve`."""
    rows, start = observation.split("\n"), where(observation)
    found, waiting = {start: 0}, deque([start])
    while waiting:
        row, column = waiting.popleft()
        if rows[row][column] == "G":
            return found[row, column]
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows)
            if inside and cell not in found and rows[cell[0]][cell[1]] != "O":
                found[cell] = found[row, column] + 1
                waiting.append(cell)
    raise AssertionError("no way")


def test_solutions_of_lakes_are_shortest() -> None:
    lake = make("frozen_lake", size=7, p=0.7)
    for seed in range(300):
        assert distance(lake.reset(seed=seed)[0]) == len(lake.solve())


# --- sokoban


@pytest.mark.parametrize("config", [{"dim_room": [7, 8], "num_boxes": 2}, {"num_boxes": 4}, {"search_depth": 40}])
def test_rooms_have_what_was_asked_for(config: dict[str, Any]) -> None:
    env = make("sokoban", **config)
    for seed in range(10):
        rows = env.reset(seed=seed)[0].split("\n")
        text = "".join(rows)
        assert [len(rows), len(rows[0])] == config.get("dim_room", [10, 10])
        boxes = config.get("num_boxes", 4)
        assert text.count("X") == boxes and text.count("√") == 0  # none is solved already
        assert text.count("O") + text.count("S") == boxes and text.count("P") + text.count("S") == 1
        assert {*rows[0], *rows[-1], *(row[0] + row[-1] for row in rows)} == {"#", "##"}


def test_a_room_is_no_further_from_solved_than_asked() -> None:
    env = make("sokoban", dim_room=[7, 7], num_boxes=2, search_depth=6)
    lengths = []
    for seed in range(40):
        env.reset(seed=seed)
        lengths.append(len(env.solve()))
    assert max(lengths) <= 6 and min(lengths) >= 2


def naive(rows: list[str], action: str) -> tuple[list[str], float]:
    """Return the map after a move, and the reward by gym-sokoban's rules; shares no code with the game."""
    cells = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
    targets = {cell for cell, mark in cells.items() if mark in "O√S"}
    boxes = {cell for cell, mark in cells.items() if mark in "X√"}
    (player,) = [cell for cell, mark in cells.items() if mark in "PS"]
    down, right = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}[action]
    reached, behind = (player[0] + down, player[1] + right), (player[0] + 2 * down, player[1] + 2 * right)
    solved = len(boxes & targets)
    if reached in boxes and cells[behind] != "#" and behind not in boxes:
        boxes = boxes - {reached} | {behind}
    if cells[reached] != "#" and reached not in boxes:
        player = reached
    gained = len(boxes & targets) - solved
    reward = -0.1 + (1 if gained > 0 else -1 if gained < 0 else 0) + (10 if boxes == targets else 0)

    def mark(cell: tuple[int, int]) -> str:
        if cells[cell] == "#":
            return "#"
        there = "box" if cell in boxes else "player" if cell == player else ""
        return {"box": "X√", "player": "PS", "": "_O"}[there][cell in targets]

    return ["".join(mark((r, c)) for c in range(len(rows[0]))) for r in range(len(rows))], reward


def test_moves_and_rewards_are_those_of_the_rules() -> None:
    random = np.random.default_rng(0)
    env = make("sokoban", dim_room=[6, 7], num_boxes=2, max_steps=200)
    seen_rewards = set()
    for seed in range(25):
        rows = env.reset(seed=seed)[0].split("\n")
        for _ in range(150):
            action = ("Up", "Down", "Left", "Right")[int(random.integers(4))]
            expected, reward = naive(rows, action)
            observation, given, terminated, _, info = env.step(said(action))
            assert (observation.split("\n"), pytest.approx(given)) == (expected, reward)
            assert info["metrics"]["action_is_effective"] == (expected != rows)
            rows = expected
            seen_rewards.add(round(given, 1))
            if terminated:
                break
    assert seen_rewards >= {-0.1, 0.9, -1.1}


def test_actions_by_other_names() -> None:
    env = make("sokoban", **SMALL_ROOM, action_lookup={"1": "North", "2": "South", "3": "West", "4": "East"})
    _, info = env.reset(seed=3)
    assert "North, South, West, East" in info["env_instruction"]
    assert played(env, env.solve())[-1][2]
    with pytest.raises(EnvironmentFailure, match=r"no room of 5 x 5.* found within .*raise dim_room"):
        make("sokoban", dim_room=[5, 5], num_boxes=6).reset(seed=0)


# --- numbers, shop


def test_guess_number_says_higher_or_lower() -> None:
    env = make("guess_number", min_number=-3, max_number=60, max_steps=9)
    env.reset(seed=2)
    number = int(env.solve()[-1])
    for guess in ("x", "61", "-4", "9" * 5000, "1.5"):
        observation, reward, terminated, _, info = env.step(said(guess))
        assert "no whole number from -3 to 60" in observation and reward == 0 and not terminated
        assert info["metrics"]["action_is_valid"] and not info["metrics"]["action_is_effective"]
    assert "lower" in env.step(said("60"))[0] if number < 60 else True
    assert env.step(said(str(number)))[1:4] == (1.0, True, False)
    assert all(len(solution(seed)) <= 5 for seed in range(200))


def solution(seed: int) -> list[str]:
    env = make("guess_number")
    env.reset(seed=seed)
    return env.solve()


def test_sums_are_counted_one_by_one() -> None:
    env = make("number_sum", turns=4)
    env.reset(seed=0)
    right = env.solve()
    rewards = [env.step(said(answer))[1] for answer in (right[0], "0", right[2])]
    assert rewards == [0.25, 0.0, 0.25]
    observation, reward, terminated, _, info = env.step("nothing")
    assert (reward, terminated, info["metrics"]["success"]) == (0.0, True, False)
    assert observation == "2 of 4 sums were right."


def test_a_purchase_is_worth_what_it_meets() -> None:
    env = make("search_shop", max_steps=50)
    env.reset(seed=1)
    solved = env.solve()
    without_size = [action for action in solved if action not in ("click[small]", "click[medium]", "click[large]")]
    assert played(env, without_size)[-1][1:3] == (0.8, True)
    env.reset(seed=1)
    kind = solved[0].removesuffix("]").split()[-1]
    other = "lamp" if kind != "lamp" else "rug"
    observation = env.step(said(f"search[{other}]"))[0]
    first = observation.partition("click[")[2].partition("]")[0]
    assert played(env, [f"click[{first}]", "buy"])[-1][1:3] == (0.0, True)


def test_the_pages_of_the_shop() -> None:
    env = make("search_shop", max_steps=50)
    start, _ = env.reset(seed=1)
    for action in ("click[buy now]", "click[B000]", "buy", "search", "search[[x]]", "click[]", "x" * 10**5):
        observation, reward, terminated, _, info = env.step(said(action))
        assert (observation, reward, terminated) == (start, 0.0, False)
        assert not info["metrics"]["action_is_effective"]
    assert "Nothing was found." in env.step(said("search[submarine]"))[0]
    env.step(said("click[back to search]"))
    first = env.step(said("search[red]"))[0]
    second = env.step(said("Click[Next >]"))[0]
    assert "Page 1 of" in first and "Page 2 of" in second and "click[< prev]" in second
    assert env.step(said("click[< prev]"))[0] == first
    item = first.partition("click[")[2].partition("]")[0]
    shown = env.step(said(f"click[{item}]"))[0]
    assert f"{item}: red" in shown and "Size: not chosen" in shown
    assert env.step(said("click[< prev]"))[0] == first
