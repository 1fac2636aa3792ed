"""`crossthinkqa`: reward for the questions of Nemotron-CrossThink (arXiv 2504.13941).

The questions are multiple choice or have a short answer. `reward_type` selects the values, as in ROLL:

    right  boxed    loose soft strict
    yes    yes        1     1     1
    yes    no         1    .5    -1
    no     yes       -1   -.5    -1
    no     no        -1    -1    -1
"""

import re
from collections.abc import Sequence
from typing import Literal

from roll_opd.extras.graders import short_answers
from roll_opd.extras.graders.choices import is_choice, options_of
from roll_opd.extras.graders.rewards.math_rule import equals
from roll_opd.extras.graders.rewards.multiple_choice import choice_score
from roll_opd.rewards.builtin.length_penalty import response_tokens, shortness
from roll_opd.rewards.interface import RewardSample, Score, choice, number
from roll_opd.rewards.reward_registry import register

RewardType = Literal["loose", "soft", "strict"]
# (right, boxed) -> value
VALUES: dict[RewardType, dict[tuple[bool, bool], float]] = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
}
_MATHEMATICAL = re.compile(r"[\d\\]")


@register("crossthinkqa", needs_ground_truth=True)
class CrossThinkQA:
    """CrossThinkQA score, with the parts `right` and `boxed`.

    `response_length_penalty_coef` is the weight of the term `shortness`, which is added to the score.
    """

    def __init__(self, reward_type: RewardType = "loose", response_length_penalty_coef: float = 0.0) -> None:
        self.values = VALUES[choice("crossthinkqa", "reward_type", reward_type, VALUES)]
        key = "response_length_penalty_coef"
        self.length_coef = number("crossthinkqa", key, response_length_penalty_coef)

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> Score:
        judged = _judge(sample)
        if judged.value is None:
            return judged
        right, boxed = judged.value == 1.0, judged.parts["boxed"] == 1.0
        value = self.values[right, boxed]
        if self.length_coef:
            tokens = response_tokens(sample)
            if tokens is None:
                return Score(None, reason="no tokens to count")
            value += self.length_coef * shortness(tokens)
        return Score(value, {"right": float(right), "boxed": float(boxed)}, judged.reason)


def _judge(sample: RewardSample) -> Score:
    """Return a score of 1.0 or 0.0, with the part `boxed`.

    The sample is graded as multiple choice if its ground truth names options, else as a short answer.
    """
    truth = sample.ground_truth
    if truth is None:
        return Score(None, reason="no ground truth")
    if is_choice(truth, options_of(sample.extra)):
        return choice_score(sample)
    text = short_answers.after_thinking(sample.response)
    boxed = {"boxed": float(short_answers.last_boxed(text) is not None)}
    answer = short_answers.final_answer(text)
    if not answer:
        return Score(0.0, boxed, "no answer")
    right = any(same_answer(answer, gold) for gold in short_answers.several(truth))
    return Score(float(right), boxed, "right" if right else "wrong answer")


def same_answer(answer: str, gold: str) -> bool:
    """Return whether two short answers are equal.

    The answers are compared as text. If `gold` has digits or LaTeX, answers with the same value are equal too.
    """
    if short_answers.same_text(answer, gold):
        return True
    return _MATHEMATICAL.search(gold) is not None and equals(answer, gold)
