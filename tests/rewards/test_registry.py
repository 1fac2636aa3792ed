"""Rewards by name: registered, ROLL's, the user's own; and what they return is checked."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from roll_opd.rewards.interface import RewardError, RewardSample, score_samples
from roll_opd.rewards.registry import register, resolve

SAMPLES = [RewardSample("a", "it is 5", "5", "t"), RewardSample("b", "it is 6", "5", "t")]

USERS_MODULE = """
def by_length(samples, scale=1.0):
    return [scale * len(sample.response) for sample in samples]

class Constant:
    def __init__(self, value):
        self.value = value

    def __call__(self, samples):
        return [self.value] * len(samples)

number = 3
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(USERS_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards"


@pytest.mark.parametrize(
    "worker", ["math_rule", "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"]
)
def test_the_math_rule_by_its_name_and_by_rolls(worker: str) -> None:
    assert score_samples(resolve(worker), SAMPLES) == [1.0, 0.0]


def test_a_users_function_and_class(users_module: str) -> None:
    assert score_samples(resolve(f"{users_module}.by_length"), SAMPLES) == [7.0, 7.0]
    assert score_samples(resolve(f"{users_module}.by_length", {"scale": 2.0}), SAMPLES) == [14.0, 14.0]
    assert score_samples(resolve(f"{users_module}.Constant", {"value": 0.5}), SAMPLES) == [0.5, 0.5]


def test_a_registered_name() -> None:
    @register("always_one")
    def always_one(samples: Sequence[RewardSample]) -> list[float]:
        return [1.0] * len(samples)

    assert score_samples(resolve("always_one"), SAMPLES) == [1.0, 1.0]
    assert score_samples(resolve("always_one"), []) == []
    with pytest.raises(RewardError, match="'always_one' is already registered"):
        register("always_one")(lambda samples: [0.0] * len(samples))


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("maths_rule", "unknown reward 'maths_rule'; known are .*math_rule"),
        ("roll.pipeline.rlvr.rewards.x.UnheardOfRewardWorker", "no counterpart here"),
        ("no_such_module.reward", "no_such_module cannot be imported"),
        ("my_rewards.absent", "no function or class named absent"),
        ("my_rewards.number", "no function or class named number"),
        ("my_rewards.Constant", "cannot be made with {}"),
    ],
)
def test_what_cannot_be_found_is_said(users_module: str, worker: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve(worker)


@pytest.mark.parametrize(("scores", "message"), [([1.0], "1 scores for 2"), ([1.0, float("nan")], "sample b")])
def test_scores_are_checked(scores: list[float], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score_samples(lambda samples: scores, SAMPLES)


def test_a_class_that_is_no_reward_is_refused() -> None:
    with pytest.raises(RewardError, match=r"json\.JSONDecoder: an instance cannot be called; write"):
        resolve("json.JSONDecoder")
