"""Actions in responses: arbitrary text, patterns with a thought, and the penalty of an invalid action."""

import time
from typing import Any

import pytest

from roll_opd.extras.games import make
from roll_opd.extras.games.action_reader import SECONDS, ActionReader

MOVES = {0: "Left", 1: "Down"}
THINK = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"


def reader(pattern: str = "<answer>(.*?)</answer>", lookup: Any = MOVES) -> ActionReader:
    return ActionReader(pattern, lookup, ["<|im_end|>", ""])


@pytest.mark.parametrize(
    ("response", "action", "content"),
    [
        ("<answer>Left</answer>", 0, "Left"),
        ("so\n<answer>\n down \n</answer><|im_end|>", 1, "down"),
        ("<answer>Le<|im_end|>ft</answer>", 0, "Left"),
        ("<answer>LEFT</answer><answer>Down</answer>", 0, "LEFT"),  # the first counts
        ("<answer><answer>Left</answer></answer>", None, "<answer>Left"),
        ("<answer>Left, Down</answer>", None, "Left, Down"),
        ("<answer></answer>", None, ""),
        ("<answer>Left", None, ""),
        ("Left", None, ""),
        ("", None, ""),
        ("\x00\ud800<answer>\ud800</answer>", None, "\ud800"),
        (None, None, ""),
        (7, None, ""),
        (b"<answer>Left</answer>", None, ""),
    ],
)
def test_actions_are_read_from_responses(response: Any, action: int | None, content: str) -> None:
    found = reader().read(response)
    assert (found.action, found.content) == (action, content)
    assert found.info == {"action": action, "action_content": content, "think_content": ""}


def test_a_thought_and_an_action() -> None:
    found = reader(THINK).read("<think> to the\nleft </think>\n <answer>left</answer>")
    assert (found.action, found.thought) == (0, "to the\nleft")
    assert reader(THINK).read("<answer>left</answer>").action is None


def test_without_a_table_any_text_is_an_action() -> None:
    assert reader(lookup=None).read("<answer>search[a b]</answer>").action == "search[a b]"
    assert reader(lookup=None).read("<answer>  </answer>").action is None


@pytest.mark.parametrize("pattern", ["<answer>(.*?)</answer>", THINK, "(a+)+$"])
@pytest.mark.parametrize("text", ["<answer>" * 20_000, "<think></think>" * 20_000, "a" * 200_000 + "b"])
def test_a_response_made_to_take_long_does_not(pattern: str, text: str) -> None:
    begun = time.thread_time()
    assert reader(pattern).read(text).action is None
    assert time.thread_time() - begun < 5 * SECONDS


@pytest.mark.parametrize(("name", "turn_costs"), [("frozen_lake", 0.0), ("sokoban", -0.1), ("guess_number", 0.0)])
def test_an_invalid_action_costs_the_penalty_and_a_turn(name: str, turn_costs: float) -> None:
    env = make(name, format_penalty=-0.25, max_steps=2)
    before, _ = env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step("I do not know")
    assert (reward, terminated, truncated) == (pytest.approx(turn_costs - 0.25), False, False)
    assert info["metrics"] == {
        "success": False,
        "action_is_valid": False,
        "action_is_effective": False,
        "format_penalty": -0.25,
    }
    assert info["metrics"].keys() == info["metrics_agg_mode"].keys()
    assert "no valid action" in info["action_desc"]
    if name != "guess_number":
        assert observation == before
    assert env.step("")[3]  # the second turn is the last
