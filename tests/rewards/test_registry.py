"""Rewards by name: registered, ROLL's, a user's; their facts, and checks of their results."""

import inspect
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from roll_opd.base.registry import argument_problems
from roll_opd.rewards import builtin
from roll_opd.rewards.interface import Failure, RewardError, RewardFunction, RewardSample, Score, read_scores
from roll_opd.rewards.reward_registry import REWARDS, RewardFacts, register, resolve, reward_arguments

SAMPLES = [RewardSample("a", "it is 5", "5", "t"), RewardSample("b", "it is 6", "5", "t")]

USERS_MODULE = """
def by_length(samples, scale=1.0):
    return [scale * len(sample.response) for sample in samples]

class Constant:
    def __init__(self, value):
        self.value = value

    def score(self, samples):
        return [self.value] * len(samples)

number = 3
"""

NEW_REWARD = """
from typing import Literal
from roll_opd.rewards import register

@register("brief", needs_ground_truth=True, max_concurrency=2)
class Brief:
    def __init__(self, price: float = 0.5, unit: Literal["word", "letter"] = "word") -> None:
        self.price = price

    def score(self, samples):
        return [self.price * len(sample.response.split()) for sample in samples]
"""


def scored(reward: RewardFunction, samples: Sequence[RewardSample]) -> list[float | None]:
    return [score.value for score in read_scores(reward(samples), samples, "it")]


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(USERS_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards"


@pytest.mark.parametrize(
    "worker", ["math_rule", "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"]
)
def test_the_math_rule_by_its_name_and_by_rolls(worker: str) -> None:
    assert scored(resolve(worker), SAMPLES) == [1.0, 0.0]


def test_a_users_function_and_class(users_module: str) -> None:
    assert scored(resolve(f"{users_module}.by_length"), SAMPLES) == [7.0, 7.0]
    assert scored(resolve(f"{users_module}.by_length", {"scale": 2.0}), SAMPLES) == [14.0, 14.0]
    assert scored(resolve(f"{users_module}.Constant", {"value": 0.5}), SAMPLES) == [0.5, 0.5]


def test_a_registered_name() -> None:
    @register("always_one")
    def always_one(samples: Sequence[RewardSample]) -> list[float]:
        return [1.0] * len(samples)

    assert scored(resolve("always_one"), SAMPLES) == [1.0, 1.0]
    with pytest.raises(RewardError, match="'always_one' is already registered"):
        register("always_one")(lambda samples: [0.0] * len(samples))


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("maths_rule", "unknown reward 'maths_rule'; did you mean 'math_rule'.*Known are .*math_rule"),
        ("roll.pipeline.rlvr.rewards.x.UnheardOfRewardWorker", "no counterpart here"),
        ("no_such_module.reward", "no_such_module cannot be imported"),
        ("my_rewards.absent", "no function or class named absent"),
        ("my_rewards.number", "no function or class named number"),
        ("my_rewards.Constant", "cannot be created with the arguments .* .none.: missing .*value"),
    ],
)
def test_what_cannot_be_found_is_said(users_module: str, worker: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve(worker)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], "it returned 1 scores for 2 samples"),
        (["right", 0], "returned 'right' for sample a; return a number"),
        ([Score(1.0, ["right"]), 0], "returned 1.0 for sample a; .* parts as a mapping of names to numbers"),
        (1.0, "it returned float; return a list"),
        ("ab", "it returned str; return a list"),
    ],
)
def test_scores_that_are_none_are_refused(scores, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        read_scores(scores, SAMPLES, "it")


def test_numbers_scores_and_failures_are_scores() -> None:
    down = Failure("http_500", "http://here answered 500 four times")
    assert read_scores([np.float32(0.5), Score(1, {"form": 0.25}, "right")], SAMPLES, "it") == [
        Score(0.5),
        Score(1.0, {"form": 0.25}, "right"),
    ]
    assert read_scores([None, down], SAMPLES, "it") == [Score(None), down]
    failed = read_scores([float("nan"), Score(1.0, {"form": float("inf")})], SAMPLES, "it")
    assert [failure.kind for failure in failed] == ["not_finite", "not_finite"]
    without, odd = read_scores([Score(None, {"form": math.nan}), Score(1, {1: 2}, 404)], SAMPLES, "it")
    assert without.kind == "not_finite" and odd == Score(1.0, {"1": 2.0}, "404")
    assert read_scores([Failure(500, None), 1], SAMPLES, "it")[0].kind == "500"


def test_a_class_that_is_no_reward_is_refused() -> None:
    with pytest.raises(RewardError, match=r"json\.JSONDecoder: the class has no method score"):
        resolve("json.JSONDecoder")


def test_a_new_reward_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brief.py").write_text(NEW_REWARD)
    monkeypatch.setattr(builtin, "__path__", [*builtin.__path__, str(tmp_path)])
    try:
        assert "brief" in REWARDS.builtin and "brief" in REWARDS.known
        assert REWARDS.facts("brief") == RewardFacts(needs_ground_truth=True, max_concurrency=2)
        assert set(reward_arguments("brief")) == {"price", "unit"}
        wrong = dict(argument_problems(REWARDS.find("brief"), {"price": "1", "unit": "line"}, given_by_us=0))
        assert wrong == {
            "price": "should be a valid number, got '1'",
            "unit": "should be 'word' or 'letter', got 'line'",
        }
        assert scored(resolve("brief", {"price": 2.0}), SAMPLES) == [6.0, 6.0]
    finally:
        REWARDS._registered.pop("brief", None)
        sys.modules.pop("roll_opd.rewards.builtin.brief", None)


@pytest.mark.extras
def test_what_is_known_of_a_reward(users_module: str) -> None:
    facts = {name: REWARDS.facts(name) for name in REWARDS.builtin}
    needing = {name for name, known in facts.items() if known.needs_ground_truth}
    assert needing == {"math_rule", "math_verify", "multiple_choice", "crossthinkqa", "general_rule"}
    keeping_time = {name for name, known in facts.items() if known.keeps_time}
    assert keeping_time == {"math_rule", "code_sandbox", "llm_judge", "remote"}
    assert {name: known.max_concurrency for name, known in facts.items() if known.max_concurrency} == {"remote": 4}
    for name, known in facts.items():
        assert known.endpoint_arguments <= reward_arguments(name).keys()
        assert bool(known.endpoint_arguments) == (name == "llm_judge")
    assert REWARDS.facts(f"{users_module}.by_length") == RewardFacts()
    assert set(reward_arguments(f"{users_module}.by_length")) == {"scale"}
    assert set(reward_arguments(f"{users_module}.Constant")) == {"value"}
    assert "complete" not in reward_arguments("llm_judge")


def test_defaults_are_of_the_annotated_types() -> None:
    for name in REWARDS.builtin:
        defaults = {key: one.default for key, one in reward_arguments(name).items()}
        part = REWARDS.find(name)  # a function gets the samples
        given = 0 if inspect.isclass(part) else 1
        assert list(argument_problems(part, defaults, given_by_us=given)) == [], name


def test_knowing_a_reward_imports_none_of_its_packages() -> None:
    heavy = {"torch", "transformers", "ray", "httpx", "math_verify", "sympy"}
    program = (
        "import sys; from roll_opd.rewards.reward_registry import REWARDS\n"
        "for name in REWARDS.builtin: REWARDS.facts(name)\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
