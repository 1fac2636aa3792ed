"""`general_rule`: reward by a named text rule.

The reward is 1.0 if the rule holds, else 0.0. Rule `f1` also gives values between 0 and 1. The rules `choice` (ROLL's
GeneralValRuleRewardWorker), `exact`, `number` and `f1` read the final answer. The rules `contains` and `regex` read all
text after the thought.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal, get_args

from roll_opd.extras.graders import short_answers
from roll_opd.extras.graders.mathematics.equality import number_in
from roll_opd.extras.graders.rewards.multiple_choice import choice_score
from roll_opd.rewards.interface import TIMEOUT, Failure, RewardError, RewardSample, Score, choice, number
from roll_opd.rewards.patterns import PatternTimeout, compiled, matches
from roll_opd.rewards.reward_registry import register

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:/\d+)?", re.ASCII)


def exact(answer: str, gold: str) -> float:
    """Return 1.0 if answer and gold are equal, else 0.0."""
    return float(bool(gold) and answer == gold)


def contains(text: str, gold: str) -> float:
    """Return 1.0 if `text` contains `gold`, else 0.0.

    A part of a longer English word or number does not count.
    """
    left = r"(?<![A-Za-z0-9_])" if gold[:1].isascii() else ""
    right = r"(?![A-Za-z0-9_])" if gold[-1:].isascii() else ""
    return float(bool(gold) and re.search(left + re.escape(gold) + right, text) is not None)


def f1(answer: str, gold: str) -> float:
    """Return the F1 score of the words of `answer` against `gold`, as in SQuAD (arXiv 1606.05250)."""
    answer_words, gold_words = answer.split(), gold.split()
    common = sum((Counter(answer_words) & Counter(gold_words)).values())
    return 2 * common / (len(answer_words) + len(gold_words)) if common else 0.0


def final_number(text: str) -> Fraction | None:
    """Return the first number of the boxed or announced answer, or else the last number of the text.

    If such an answer has an equals sign, only the text after its last equals sign is read.
    """
    boxed = short_answers.last_boxed(text)
    for part in short_answers.announced(text) if boxed is None else (boxed,):
        numbers = _numbers(part.rpartition("=")[2])
        if numbers:
            return number_in(numbers[0])
    numbers = _numbers(text)
    return number_in(numbers[-1]) if numbers else None


def _numbers(text: str) -> list[str]:
    return [found for found in _NUMBER.findall(short_answers.undecorated(text)) if found]


# rule on normalised text -> (function, part of the response that the function reads)
TEXT_RULES: dict[str, tuple[Callable[[str, str], float], Callable[[str], str]]] = {
    "exact": (exact, short_answers.final_answer),
    "contains": (contains, str),
    "f1": (f1, short_answers.final_answer),
}
Rule = Literal["choice", "exact", "contains", "f1", "regex", "number"]


@register("general_rule", needs_ground_truth=True)
class GeneralRule:
    """Score by a text rule.

    If the ground truth is a JSON list, the score is the best one over the entries of the list.
    """

    def __init__(
        self,
        rule: Rule = "choice",
        normalize: Sequence[short_answers.Normalization] = tuple(short_answers.NORMALIZATIONS),
        tolerance: float = 0.0,
    ) -> None:
        self.rule = choice("general_rule", "rule", rule, get_args(Rule))
        if isinstance(normalize, str):
            raise RewardError(f"reward general_rule: normalize is {normalize!r}; write a list, such as [case, spaces]")
        self.normalize = tuple(
            choice("general_rule", "normalize", name, short_answers.NORMALIZATIONS) for name in normalize
        )
        self.tolerance = number("general_rule", "tolerance", tolerance, least=0)

    def score(self, samples: Sequence[RewardSample]) -> list[Score | Failure]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> Score | Failure:
        if self.rule == "choice":
            return choice_score(sample)
        if sample.ground_truth is None:
            return Score(None, reason="no ground truth")
        text = short_answers.after_thinking(sample.response)
        if self.rule == "regex":
            return _by_regex(text, sample.ground_truth)
        golds = short_answers.several(sample.ground_truth)
        value = self._by_number(text, golds) if self.rule == "number" else self._by_text(text, golds)
        if value is None:
            return Score(None, reason="ground truth is not a number")
        return Score(value, reason="right" if value == 1.0 else "partly right" if value else "wrong answer")

    def _by_text(self, text: str, golds: Sequence[str]) -> float:
        rule, part = TEXT_RULES[self.rule]
        answer = short_answers.normalized(part(text), self.normalize)
        return max(rule(answer, short_answers.normalized(gold, self.normalize)) for gold in golds)

    def _by_number(self, text: str, golds: Sequence[str]) -> float | None:
        values = [value for value in map(number_in, golds) if value is not None]
        if len(values) < len(golds):
            return None
        answer = final_number(text)
        close = answer is not None and any(abs(answer - gold) <= self.tolerance * abs(gold) for gold in values)
        return float(close)


def _by_regex(text: str, pattern: str) -> Score | Failure:
    """Return 1.0 if the row's pattern matches a part of the text, else 0.0."""
    try:
        found = matches(compiled("general_rule", "ground_truth", pattern), text, whole=False)
    except RewardError:
        return Score(None, reason="ground truth is not a regular expression")
    except PatternTimeout as timeout:
        return Failure(TIMEOUT, f"reward general_rule: the row's pattern {timeout}")
    return Score(float(found), reason="right" if found else "wrong answer")
