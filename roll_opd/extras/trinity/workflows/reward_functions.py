"""Trinity-RFT's reward functions for mathematics. They check final answers with this package's rule for mathematics.

A workflow calls the function that the configuration's `workflow_reward` names. The arguments have the same order as in
Trinity-RFT. Other keyword arguments are ignored.
"""

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

from roll_opd.rewards.interface import RewardSample, Score
from roll_opd.rewards.reward_registry import resolve
from roll_opd.workflows.workflow_interface import REWARD_FUNCTIONS, RewardFn

MAX_FORMULA_CHARACTERS = 1000
FORMAT = r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>"
LOOSE_FORMAT = r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*"
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def accuracy(response: str, truth: Any) -> float:
    """Return 1.0 if the reward `math_rule` finds the final answer of a response right, else 0.0.

    The result is also 0.0 if the comparison fails or times out.
    """
    (score,) = math_rule()([RewardSample("", response, "" if truth is None else str(truth), "")])
    return float(isinstance(score, Score) and score.value == 1.0)


@cache
def math_rule() -> Callable[[list[RewardSample]], Any]:
    """Return the reward `math_rule`. It is found once, because it may start processes."""
    return resolve("math_rule")


def has_thought(response: str) -> bool:
    """Return whether a response has exactly one `<think>` and, after it, exactly one `</think>`."""
    return re.findall(r"</?think>", response) == ["<think>", "</think>"]


@REWARD_FUNCTIONS.register_module("accuracy_reward")
class AccuracyReward(RewardFn):
    """Returns 1 for a correct final answer, else 0.

    If `answer_parser` is given, it is called on the response and on the truth. The answer is correct if both results
    are equal.
    """

    def __init__(self, answer_parser: Callable[[str], Any] | None = None) -> None:
        self.answer_parser = answer_parser

    def __call__(self, response: str, prompt: Any = None, truth: str | None = None, **_: Any) -> dict[str, float]:
        """Return `accuracy`."""
        if self.answer_parser is None:
            return {"accuracy": accuracy(response, truth)}
        return {"accuracy": float(self.answer_parser(response) == self.answer_parser(str(truth or "")))}


@REWARD_FUNCTIONS.register_module("format_reward")
class FormatReward(RewardFn):
    """Returns 0.1 if the whole response matches `pattern`, else -0.1."""

    def __init__(self, pattern: str | None = None) -> None:
        self.pattern = re.compile(pattern or FORMAT, re.DOTALL)

    def __call__(self, response: str, **_: Any) -> dict[str, float]:
        """Return `format_score`."""
        return {"format_score": 0.1 if self.pattern.fullmatch(response) else -0.1}


@REWARD_FUNCTIONS.register_module("math_reward")
class MathRewardFn(RewardFn):
    """Returns the parts of `accuracy_reward` and `format_reward`. The reward is their sum.

    The expected format is a thought in tags, followed by an answer in tags.
    """

    def __init__(self, answer_parser: Callable[[str], Any] | None = None, pattern: str = LOOSE_FORMAT) -> None:
        self.accuracy_reward, self.format_reward = AccuracyReward(answer_parser), FormatReward(pattern)

    def __call__(self, response: str, prompt: Any = None, truth: str | None = None, **_: Any) -> dict[str, float]:
        """Return `accuracy` and `format_score`."""
        return self.accuracy_reward(response, prompt, truth) | self.format_reward(response)


@REWARD_FUNCTIONS.register_module("math_boxed_reward")
class MathBoxedRewardFn(RewardFn):
    """Returns 1 for a correct final answer, else 0.

    If `with_think` is set, a response without exactly one thought loses `format_score_coef`.
    """

    def __call__(
        self,
        response: str,
        truth: str | None = None,
        with_think: bool | None = False,
        format_score_coef: float | None = 0.1,
        **_: Any,
    ) -> dict[str, float]:
        """Return `accuracy` and `format_score`."""
        thoughtless = bool(with_think) and not has_thought(response)
        return {"accuracy": accuracy(response, truth), "format_score": -(format_score_coef or 0.1) * thoughtless}


@REWARD_FUNCTIONS.register_module("countdown_reward")
class CountDownRewardFn(RewardFn):
    """Returns a score for the formula in the `<answer>` tags.

    - 1 if the formula gives the target and uses each number once.
    - 0.1 for any other content of the tags.
    - 0 if the tags are missing.

    The truth is an object with `target` and `numbers`, or the JSON of such an object.
    """

    def __call__(self, response: str, prompt: Any = None, truth: Any = None, **_: Any) -> dict[str, float]:
        """Return `score`."""
        wanted = json.loads(truth) if isinstance(truth, str) else truth
        answers = ANSWER.findall(response)
        if not answers:
            return {"score": 0.0}
        formula = answers[-1].strip()
        numbers = Counter(map(int, re.findall(r"\d+", formula[:MAX_FORMULA_CHARACTERS])))
        try:
            right = numbers == Counter(map(int, wanted["numbers"])) and computed(formula) == Fraction(wanted["target"])
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            right = False
        return {"score": 1.0 if right else 0.1}


def computed(formula: str) -> Fraction:
    """Return the exact value of a formula. A formula may have integers, parentheses and the operators + - * /.

    Raises ValueError or SyntaxError if the text is not such a formula. Raises ZeroDivisionError for a division by 0.
    """
    if len(formula) > MAX_FORMULA_CHARACTERS:
        raise ValueError(f"the formula has {len(formula)} characters")

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Fraction(node.value)
        raise ValueError(f"not a formula of integers: {ast.unparse(node)}")

    return value(ast.parse(formula, mode="eval").body)
